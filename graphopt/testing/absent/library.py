"""Builds the native library that simulates a device, once per version of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from graphopt.errors import PretendError
from graphopt.ir.user_files import cache_folder

SOURCE = Path(__file__).with_name("cuda.cpp")
_COMPILERS = ("c++", "g++", "clang++")


def built() -> Path:
    """Returns the library, built at its first use and cached.

    Raises:
        PretendError: there is no C++ compiler, or it failed.
    """
    made_of = f"{SOURCE.read_text()} {torch.__version__} {torch.__file__}"
    library = cache_folder() / f"pretended-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _build(library)
    return library


def torch_libraries() -> list[Path]:
    """Returns the torch libraries that must be loaded before it."""
    folder = _torch() / "lib"
    return [folder / "libc10.so", folder / "libtorch_cpu.so"]


def _torch() -> Path:
    return Path(torch.__file__).parent


def _build(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    headers = [_torch() / "include", _torch() / "include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made)),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in headers),
            *(f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PretendError(
                f"{command[0]} could not build the library that simulates a device:\n"
                + done.stderr.strip()[-2000:],
                hint="it needs a compiler of C++20: g++ 11 or clang 14, or set CXX to one",
            )
        os.replace(made, library)  # whole, also where two processes build it at once


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        found = shutil.which(name)
        if found is not None:
            return found
    raise PretendError(
        f"there is no C++ compiler ({', '.join(_COMPILERS)})",
        hint="install one, or set CXX to its path; it runs once for each version of torch",
    )
