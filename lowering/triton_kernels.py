"""Compilation of a graph to Triton kernels for a named architecture, without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from graphopt import _compat
from graphopt._compat import triton_binaries
from graphopt._compat.triton import pretended_gpu
from graphopt.errors import LoweringError
from graphopt.graph_utils import follows_output_convention, without_autocast
from graphopt.iter_graph.graph import copy_graph
from graphopt.lowering.extract import region_graphs
from graphopt.lowering.triton_code import cuda_code

_TARGET = re.compile(r"cuda:(\d+)")
_NUMBERED = re.compile(r"_\d+$")


@dataclass(frozen=True)
class TritonKernel:
    """A compiled Triton kernel: source, PTX, cubin and its resource use.

    Attributes:
        name: made of the operators in it and a number: the same graph gives the same names.
        source: the source of its Python module, which needs only torch and Triton.
        ptx: the assembly.
        cubin: the machine code, an ELF file.
        registers: per thread.
        shared_bytes: shared memory per block.
        spills: bytes per thread that go to and from memory for lack of registers.
        num_warps: warps per block.
        regions: numbers of the regions that launch it.

    >>> gm = graphopt.capture(lambda m, x: m(x).exp(), torch.nn.Tanh(), torch.ones(8)).graph_module
    >>> (kernel,) = graphopt.lowering.compile_triton(gm, min_ops=1)
    >>> kernel.spills, kernel.cubin[1:4]
    (0, b'ELF')
    """

    name: str
    source: str
    ptx: str
    cubin: bytes
    registers: int
    shared_bytes: int
    spills: int
    num_warps: int
    regions: tuple[int, ...]


@dataclass(frozen=True)
class Failure:
    """A region, or a kernel of it, that cannot be compiled."""

    region: int
    kernel: str | None
    reason: str

    def __str__(self) -> str:
        part = f"region {self.region}"
        if self.kernel is not None:
            part += f", kernel {self.kernel}"
        return f"{part}: {self.reason}"


@dataclass
class TritonReport:
    """The kernels and the failures of compiling a graph.

    Attributes:
        target: such as ``"cuda:90"``.
        regions: the number of regions of the graph.
        kernels: the kernels, in the order of their first launch.
        externs: the number of calls of each library kernel, such as `mm` of cuBLAS.
        failures: the regions and kernels that could not be compiled.
    """

    target: str
    regions: int = 0
    kernels: list[TritonKernel] = field(default_factory=list)
    externs: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def compile_triton(
    gm: fx.GraphModule, target: str = "cuda:90", *, min_ops: int = 10
) -> list[TritonKernel]:
    """Compiles a graph to Triton kernels, PTX and cubins; no GPU is needed or used.

    Args:
        gm: a captured step (`graphopt.capture(...).graph_module`, `train_step.graph_module`), of
            which every lowerable region is compiled, or any other graph of ATen operators whose
            placeholders have ``meta["val"]``, which is compiled as one. It may be one of CPU
            tensors, and stays as it is.
        target: ``"cuda:"`` and a compute capability, such as ``"cuda:90"`` for Hopper.
        min_ops: smaller regions of a captured step are left out.

    Returns:
        The kernels, each once, in the order in which they are launched. Matrix products,
        convolutions and attention are calls of libraries, not kernels.

    Raises:
        LoweringError: Triton is not installed, the target is not known, or something cannot be
            lowered: the message names the node and the user's line.

    >>> from graphopt.lowering import compile_triton
    >>> def wave(model, x):
    ...     return torch.tanh(torch.exp(x.cos() * 2) + x.sin())
    >>> gm = graphopt.capture(wave, torch.nn.Identity(), torch.ones(8)).graph_module
    >>> (kernel,) = compile_triton(gm, "cuda:90", min_ops=3)
    >>> kernel.name.startswith("triton_poi_fused"), ".target sm_90" in kernel.ptx
    (True, True)
    """
    report = lower_to_triton(gm, target, min_ops=min_ops)
    if report.failures:
        raise LoweringError("\n".join(map(str, report.failures)))
    return report.kernels


def lower_to_triton(
    gm: fx.GraphModule,
    target: str = "cuda:90",
    *,
    min_ops: int = 10,
    progress: Callable[[str], None] | None = None,
) -> TritonReport:
    """Compiles as `compile_triton`, but reports failures and compiles the rest.

    Args:
        progress: told the name of each kernel before it is compiled.

    Raises:
        LoweringError: Triton is not installed, or the target is not known.
    """
    capability = parse_target(target)
    report = TritonReport(target)
    regions = _regions(gm, min_ops)
    report.regions = len(regions)
    with _compat.without_modes(), without_autocast(), pretended_gpu(capability):
        for name, source, used_in in _sources(regions, report):
            if progress is not None:
                progress(name)
            try:
                binary = triton_binaries.compile_kernel(name, source, capability)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".strip()
                report.failures.append(Failure(used_in[0], name, reason))
                continue
            report.kernels.append(
                TritonKernel(
                    name=name,
                    source=source,
                    ptx=binary.ptx,
                    cubin=binary.cubin,
                    registers=binary.usage.registers,
                    shared_bytes=binary.shared_bytes,
                    spills=binary.usage.spills,
                    num_warps=binary.num_warps,
                    regions=used_in,
                )
            )
    return report


def parse_target(target: str) -> int:
    """The compute capability of a target: 90 for ``"cuda:90"``.

    Raises:
        LoweringError: Triton is not installed, or has no code for it.
    """
    if not triton_binaries.is_installed():
        raise LoweringError("Triton is not installed\n  hint:  pip install 'graphopt[triton]'")
    known = triton_binaries.capabilities()
    match = _TARGET.fullmatch(target)
    if match is None or int(match[1]) not in known:
        listed = ", ".join(f"cuda:{capability}" for capability in known)
        raise LoweringError(f"there is no target {target!r}; known are {listed}")
    return int(match[1])


def _regions(gm: fx.GraphModule, min_ops: int) -> list[fx.GraphModule]:
    if follows_output_convention(gm.graph):
        graph, _ = copy_graph(gm.graph)
        return region_graphs(fx.GraphModule(gm, graph), min_ops=min_ops)
    return [gm]


def _sources(
    regions: Iterable[fx.GraphModule], report: TritonReport
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, source and regions of each kernel; kernels that differ only in name are merged."""
    used_in: dict[tuple[str, str], list[int]] = {}
    for number, region in enumerate(regions):
        try:
            code = cuda_code(region)
        except LoweringError as error:
            report.failures.append(Failure(number, None, str(error)))
            continue
        report.externs += code.externs
        for name, source in code.kernels:
            stem = _NUMBERED.sub("", name)
            key = (stem, _renamed(source, name, stem))
            used_in.setdefault(key, []).append(number)
    found = []
    for index, ((stem, source), numbers) in enumerate(used_in.items()):
        name = f"{stem}_{index}"
        found.append((name, _renamed(source, stem, name), tuple(dict.fromkeys(numbers))))
    return found


def _renamed(source: str, name: str, new_name: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", new_name, source)
