"""Assembly of Triton kernels to machine code, by Triton's own assembler.

Written for Triton 3.6 to 3.9, which torch 2.11 to 2.15 are used with.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

OLDEST = 70
"""Inductor's kernels need compute capability 7.0."""


class KernelUsage(NamedTuple):
    """Registers and spilled bytes per thread of a kernel."""

    registers: int
    spills: int


class Binary(NamedTuple):
    """A compiled kernel: PTX, cubin and its resource use."""

    ptx: str
    cubin: bytes
    shared_bytes: int
    num_warps: int
    usage: KernelUsage


def is_installed() -> bool:
    """True if the package triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def version() -> str:
    """The installed version of Triton."""
    import triton

    return str(triton.__version__)


def capabilities() -> list[int]:
    """The compute capabilities that Triton's assembler supports."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    assemblers = {get_ptxas(capability).path for capability in (OLDEST, 90, 100)}
    offered = {
        int(number) for path in assemblers for number in re.findall(r"'sm_(\d+)", _help(path))
    }
    return sorted(
        capability
        for capability in offered
        if capability >= OLDEST
        and f"'{sm_arch_from_capability(capability)}'" in _help(get_ptxas(capability).path)
    )


@functools.cache
def _help(assembler: str) -> str:
    return subprocess.run([assembler, "--help"], capture_output=True, text=True, check=True).stdout


def gpu_target(capability: int) -> Any:
    """Triton's target name for a compute capability such as 90."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def compile_kernel(name: str, source: str, capability: int) -> Binary:
    """Compiles a kernel that Inductor wrote, inside `pretended_gpu`.

    Of the configurations between which Inductor would choose by running them it takes the first.
    """
    import triton
    from triton.compiler import ASTSource

    tuner = getattr(_imported(name, source), name)
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    function = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = tuner._create_compile_options(config, meta)
    # Triton prints the whole code of a kernel that the assembler refuses, and raises as well.
    with triton.knobs.compilation.scope(), contextlib.redirect_stdout(io.StringIO()):
        # Line numbers would be those of a temporary file.
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(function, target=gpu_target(capability), options=options)
    return Binary(
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        usage=usage(compiled.asm["ptx"], capability, fuse=compiled.metadata.enable_fp_fusion)[0],
    )


def _imported(name: str, source: str) -> ModuleType:
    """Imports a kernel's source as a module; Triton reads functions from their file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def usage(ptx: str, capability: int, *, fuse: bool) -> tuple[KernelUsage, bytes]:
    """The assembler's resource report and the cubin of a kernel; Triton itself drops the report.

    Args:
        fuse: whether a multiplication and an addition may become one operation.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    architecture = f"--gpu-name={sm_arch_from_capability(capability)}"
    options = ["-v", "-lineinfo", "-suppress-debug-info", "--regAllocOptLevel=2", architecture]
    if not fuse:
        options.append("--fmad=false")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, *options, str(source), "-o", str(binary)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        cubin = binary.read_bytes()
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return KernelUsage(registers, spills), cubin
