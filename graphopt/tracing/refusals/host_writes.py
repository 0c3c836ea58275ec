"""Refusal of a step's output (print, logs, warnings, files) and clock reads, which would happen at
capture only.

    print(loss)         refused, with its line
    logger.warning(…)   refused where the program says it; a message of a package's own, or of the
                        kernel of an operator, is let through, as the trace runs
"""

from __future__ import annotations

import builtins
import datetime
import io
import logging
import pathlib
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphopt.ir.user_frames import (
    current_user_line,
    is_in_operator,
    is_installed,
    is_own_file,
    is_torch_file,
)
from graphopt.tracing.interception.replaced_functions import calling_frame, replaced
from graphopt.tracing.refusals.host_work import HostWork

_CLOCKS = frozenset(
    getattr(time, name)
    for name in (
        *("time", "perf_counter", "monotonic", "process_time", "thread_time"),
        *("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns", "thread_time_ns"),
    )
)
_OF_NOW: dict[Any, int] = {
    time.ctime: 0,
    time.asctime: 0,
    time.localtime: 0,
    time.gmtime: 0,
    time.strftime: 1,
}
"""Functions that take the time of now where they are given no more than so many arguments."""
_DATES = frozenset({"now", "today", "utcnow"})
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "exception": 40,
           "critical": 50, "fatal": 50, "log": 50}  # fmt: skip
_OF_BARS = frozenset(
    {"set_postfix", "set_postfix_str", "set_description", "set_description_str", "update", "write",
     "refresh", "display", "tqdm", "tqdm_notebook", "trange"}
)  # fmt: skip
_WRITING = frozenset("wax+")
_OF_PATHS = frozenset(
    {"write_text", "write_bytes", "unlink", "mkdir", "rmdir", "touch", "rename", "replace", "chmod",
     "symlink_to", "hardlink_to"}
)  # fmt: skip


def written_by(callee: Any, args: Sequence[Any]) -> tuple[HostWork, str] | None:
    """The kind of host work that a call does, and its name in messages; None if it does none.

    Args:
        args: positional values, the object of a method first, and those of keywords.
    """
    name = getattr(callee, "__name__", "")
    if _reads_clock(callee, name, args):
        return HostWork.CLOCK, f"{name}()"
    line = current_user_line()
    if line is None or is_installed(line.file):
        return None
    if callee is warnings.warn:
        return HostWork.WARNING, ""
    owner, function = _owner(callee, args), getattr(callee, "__func__", callee)
    if name in _LEVELS and getattr(function, "__module__", None) == "logging":
        return (HostWork.LOG, f"{name}()") if _is_heard(owner, name, args) else None
    if shows(owner, name):
        return HostWork.LOG, f"{_kind_of(owner).__name__}.{name}()"
    if _writes(owner, name, args):
        return HostWork.WRITE, f"{name}() of a {_kind_of(owner).__name__}"
    return None


def _reads_clock(callee: Any, name: str, args: Sequence[Any]) -> bool:
    if not isinstance(callee, types.BuiltinFunctionType):
        return False
    if callee in _CLOCKS or len(args) <= _OF_NOW.get(callee, -1):
        return True
    owner = callee.__self__
    return name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date)


def _owner(callee: Any, args: Sequence[Any]) -> Any:
    owner = getattr(callee, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return owner
    return callee if isinstance(callee, type) else args[0] if args else None


def _kind_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def shows(owner: Any, name: str) -> bool:
    """True if a method of a well-known package's object only displays something."""
    homes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in _kind_of(owner).__mro__}
    packages = {package for package, _ in homes}
    if "tqdm" in packages:
        return name in _OF_BARS
    if any(kind == "SummaryWriter" for _, kind in homes):
        return name.startswith("add_") or name == "flush"
    return "wandb" in packages and name == "log"


def _is_heard(owner: Any, name: str, args: Sequence[Any]) -> bool:
    """True if a log message or warning reaches somebody."""
    logger = owner if isinstance(owner, logging.Logger) else logging.getLogger()
    level = _LEVELS[name]
    return logger.isEnabledFor(level) and (logger.hasHandlers() or level >= logging.WARNING)


def _writes(owner: Any, name: str, args: Sequence[Any]) -> bool:
    """True if a method writes to a file or table."""
    if isinstance(owner, io.IOBase):
        return name in ("write", "writelines", "truncate")
    if isinstance(owner, pathlib.Path):
        return name in _OF_PATHS or (name == "open" and any(map(_is_writing_mode, args[1:])))
    return type(owner).__module__ == "_csv" and name in ("writerow", "writerows")


def _is_writing_mode(value: Any) -> bool:
    return isinstance(value, str) and not _WRITING.isdisjoint(value)


@contextmanager
def no_printing() -> Iterator[None]:
    """While active, `print` by the step's code is refused."""
    real = builtins.print

    def checked(*args: Any, **options: Any) -> None:
        frame = calling_frame()
        if not _is_of_package(frame.f_code.co_filename) and not is_in_operator(frame):
            raise HostWork.PRINT.refused()
        real(*args, **options)

    with replaced((builtins, "print", checked)):
        yield


def _is_of_package(file: str) -> bool:
    return is_installed(file) or is_torch_file(file) or is_own_file(file)
