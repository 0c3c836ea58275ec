"""Refusal of a step's reads from files, folders and processes: a graph would keep what it found at
capture.

    np.load(path)  ──▶ builtins.open, called by numpy, called by the step: refused, with its line
    import scipy   ──▶ opens files as well, for the import system: let through
    model(x)       ──▶ what a package reads within a module that torch calls: let through
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import (
    frames,
    is_around_step,
    is_installed,
    is_library_file,
    is_own_file,
    is_torch_file,
)
from graphopt.tracing.interception.replaced_functions import passes, replaced
from graphopt.tracing.refusals.host_work import HostWork

_OF_OS = ("open", "listdir", "scandir", "stat", "lstat", "access", "readlink", "system", "popen",
          "getcwd", "getloadavg", "cpu_count")  # fmt: skip
_READING = (
    *(builtins.input, *(getattr(os, name) for name in _OF_OS)),
    *(os.path.exists, os.path.isfile, os.path.isdir, os.path.getmtime, os.path.getsize),
)
_WRITING = frozenset("wax+")
_OF_PATHS = frozenset(
    {"read_text", "read_bytes", "stat", "lstat", "exists", "is_file", "is_dir", "iterdir",
     "glob", "rglob", "walk", "resolve", "owner", "readlink"}
)  # fmt: skip
_MODULES = frozenset({"subprocess", "urllib.request", "http.client", "glob", "sqlite3", "shutil"})
_PACKAGES = frozenset(
    {"safetensors", "h5py", "lmdb", "pyarrow", "soundfile", "psutil", "pynvml", "zarr"}
)
"""Packages whose C or Rust code opens files, or asks the system."""
_NAMES = frozenset({"imread", "imdecode", "VideoCapture"})
_INFRASTRUCTURE = frozenset(
    {"importlib", "linecache", "warnings", "traceback", "inspect", "tokenize", "logging", "ctypes",
     "zipimport", "pkgutil", "zipfile", "sysconfig", "platform"}
)  # fmt: skip
"""Modules of the standard library that read for Python itself."""


def read_by(callee: Any, args: Sequence[Any]) -> str | None:
    """The name in messages of a call that reads from a file, folder or process; None for other
    calls.

    Args:
        args: positional values, the object of a method first, and those of keywords.
    """
    name = getattr(callee, "__name__", "")
    module = str(getattr(callee, "__module__", None) or type(callee).__module__)
    owner = getattr(callee, "__self__", args[0] if args else None)
    of_path = isinstance(owner, pathlib.Path) and name in _OF_PATHS
    if of_path and getattr(type(owner), name, None) is getattr(callee, "__func__", callee):
        return f"Path.{name}()"
    if isinstance(owner, socket.socket) or name in _NAMES:
        return f"{name}()"
    if module in _MODULES or module.partition(".")[0] in _PACKAGES:
        return f"{module}.{name or type(callee).__name__}()"
    read = name and any(callee is each for each in _READING)
    return f"{module}.{name}()" if read else None


@contextmanager
def no_reading() -> Iterator[None]:
    """While active, reads from files, folders and processes by the step's code are refused, also
    through libraries, as is opening files to write."""
    thread, looking = threading.get_ident(), False

    def line_of(frame: FrameType) -> SourceLine | None:
        nonlocal looking
        if looking or threading.get_ident() != thread:
            return None
        looking = True  # at paths, which asks the system as well
        try:
            return asking_line(frame)
        finally:
            looking = False

    def checked(
        function: Callable[..., Any], said: str, work: HostWork = HostWork.READ
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            line = line_of(sys._getframe(1))
            if line is not None:
                raise work.refused(said, line)
            return function(*args, **options)

        return call

    def refuse_load(*args: Any, **options: Any) -> None:
        raise HostWork.READ.refused("torch.load()")

    real = builtins.open
    reads, writes = checked(real, "open()"), checked(real, "open()", HostWork.WRITE)

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        reading = _WRITING.isdisjoint(mode)
        return (reads if reading else writes)(file, mode, *args, **options)

    with replaced(
        (builtins, "open", opened),
        (io, "open", opened),
        *((os, name, checked(getattr(os, name), f"os.{name}()")) for name in _OF_OS),
        (subprocess.Popen, "__init__", checked(subprocess.Popen.__init__, "subprocess.Popen()")),
        (torch, "load", refuse_load),
    ):
        yield


def asking_line(frame: FrameType) -> SourceLine | None:
    """The line of the step's code that causes a read; None if Python, torch or graphopt read for
    themselves."""
    for each in frames(frame):
        file = each.f_code.co_filename
        if file == __file__ or passes(each.f_code):
            continue
        if is_around_step(each) or is_own_file(file) or is_torch_file(file):
            return None
        if not is_library_file(file):
            if not is_installed(file):
                return SourceLine.of(each)
        elif _is_infrastructure(file):
            return None
    return None


def _is_infrastructure(file: str) -> bool:
    if file.startswith("<frozen "):
        name = file.removeprefix("<frozen ").removesuffix(">")
        return name.partition(".")[0] in _INFRASTRUCTURE
    path = Path(file)
    return path.stem in _INFRASTRUCTURE or not _INFRASTRUCTURE.isdisjoint(path.parts[-3:])
