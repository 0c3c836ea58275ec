"""Stack frames of the user's code, which nodes and errors are attributed to."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from graphopt import _compat
from graphopt.ir.source import SourceLine

_TORCH = str(Path(torch.__file__).resolve().parent) + "/"
_GRAPHOPT = str(Path(__file__).resolve().parent.parent) + "/"
_STEP_RUN = _GRAPHOPT + "tracing/step_run.py"
_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
_FORWARD_CODE = _compat.module_call_code()


@lru_cache(maxsize=4096)
def is_library_file(filename: str) -> bool:
    """True if a file belongs to torch, graphopt or the interpreter rather than to the user."""
    if filename.startswith("<"):
        return not filename.startswith(("<stdin", "<ipython", "<string"))
    path = _resolved(filename)
    if path.startswith(_GRAPHOPT):
        return not path.startswith(_GRAPHOPT + "demo/")
    return path.startswith(_TORCH) or _is_standard_library(path)


def is_tracing_file(filename: str) -> bool:
    """True if a file belongs to graphopt or to torch's tracing machinery."""
    path = _resolved(filename)
    return is_own_file(filename) or path.startswith((_TORCH + "_", _TORCH + "fx/"))


@lru_cache(maxsize=4096)
def is_own_file(filename: str) -> bool:
    """True if a file belongs to graphopt."""
    return _resolved(filename).startswith(_GRAPHOPT)


def is_installed(filename: str) -> bool:
    """True if a file belongs to an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


@lru_cache(maxsize=4096)
def is_torch_file(filename: str) -> bool:
    return _resolved(filename).startswith(_TORCH)


def is_asked_by_torch(frame: types.FrameType) -> bool:
    """True if torch's code calls a function, directly or through graphopt's."""
    files = (each.f_code.co_filename for each in frames(frame))
    return is_torch_file(next(file for file in files if not is_own_file(file)))


def is_in_operator(frame: types.FrameType) -> bool:
    """True if the kernel of an operator runs, or what stands for it with fake tensors, rather than
    the step's own code: a graph calls it in every step."""
    for each in frames(frame):
        name = each.f_code.co_filename
        if name.endswith("torch/_library/autograd.py"):
            return False  # whose functions are recorded
        if name.endswith("torch/_ops.py"):
            owner = each.f_locals.get("self")
            return isinstance(owner, _OPERATORS)
    return False


def _resolved(filename: str) -> str:
    """Returns a path with symbolic links resolved."""
    if os.path.islink(filename) or not os.path.isabs(filename):
        return os.path.realpath(filename)
    folder, name = os.path.split(filename)
    return os.path.join(_resolved_folder(folder), name)


@lru_cache(maxsize=4096)
def _resolved_folder(folder: str) -> str:
    return os.path.realpath(folder)


_STANDARD_LIBRARY = str(Path(linecache.__file__).resolve().parent) + "/"


def _is_standard_library(path: str) -> bool:
    return not is_installed(path) and path.startswith(_STANDARD_LIBRARY)


def frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yields a frame and its callers, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def current_user_line() -> SourceLine | None:
    """Returns the innermost line of the running step that belongs to the user, or None."""
    return inside_step(sys._getframe(1))


def current_location() -> str | None:
    """Returns the innermost user line of the running step as text, or None."""
    line = current_user_line()
    return None if line is None else str(line)


def own_location() -> str | None:
    """Returns as text the innermost line of the running step outside all libraries and installed
    packages; else one of an installed package."""
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_around_step(frame):
            break
        if not (is_library_file(file) or is_installed(file)):
            return str(SourceLine(file, frame.f_lineno, frame.f_code.co_name))
    return current_location()


def current_modules() -> list[torch.nn.Module]:
    """Returns the modules whose forward is running within the step, outermost first."""
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_around_step(frame):
        if frame.f_code is _FORWARD_CODE:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def inside_step(frame: types.FrameType | None) -> SourceLine | None:
    """Returns the innermost user line of the traced step, from `frame` outwards, or None."""
    while frame is not None:  # asked for each node, over some forty frames
        file = frame.f_code.co_filename
        if file == _STEP_RUN:
            return None
        if not is_library_file(file):
            return SourceLine(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def is_around_step(frame: types.FrameType) -> bool:
    """True if a frame belongs to the code that traces a step."""
    return frame.f_code.co_filename == _STEP_RUN


def user_line_of(error: BaseException) -> SourceLine | None:
    """Returns the user's line that raised `error` while the step was traced, or None."""
    user = [
        SourceLine(frame.filename, frame.lineno or 0, frame.name)
        for frame in _step_frames(error)
        if not is_library_file(frame.filename)
    ]
    return user[-1] if user else None


def running_in_step(error: BaseException) -> list[tuple[str, str]]:
    """Returns (file, name) of the traced step's functions at an error, outermost first."""
    return [(frame.filename, frame.name) for frame in _step_frames(error)]


def _step_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the traced step within an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    traced = [index for index, frame in enumerate(frames) if frame.filename == _STEP_RUN]
    return list(frames[traced[-1] + 1 :]) if traced else []
