"""Objects without Python code other than containers: files, iterators, queues, locks, C arrays.

What their methods do cannot be seen, and no later call would do it. So calls by name are taken for
changes, as is giving a file or an iterator to code that is not observed.
"""

from __future__ import annotations

import contextvars
import io
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord

_ASKING_FILES = frozenset(
    {"getvalue", "getbuffer", "tell", "fileno", "isatty", "readable", "writable", "seekable",
     "flush", "__enter__", "__exit__"}
)  # fmt: skip
_ASKING_ITERATORS = frozenset(
    {"__iter__", "__next__", "__length_hint__", "__reduce__", "__class__"}
)
_WRITERS = frozenset(
    {"_csv", "mmap", "_queue", "_socket", "zlib", "_hashlib", "_sqlite3", "_pickle"}
)
"""Modules of C whose objects are there to be changed."""
CHANGING_ARRAYS = frozenset(
    {"fill", "put", "itemset", "partition", "resize", "setflags", "setfield", "byteswap", "sort",
     "__setitem__", "fromlist", "frombytes", "fromfile", "fromunicode"}
)  # fmt: skip
"""Methods of arrays that write to them."""
_OF_THREADS = frozenset({"set", "clear", "notify", "notify_all", "acquire", "release"})
_OF_PROCESS = frozenset(
    {"write", "putenv", "unsetenv", "chdir", "mkdir", "rmdir", "unlink", "remove", "rename",
     "replace", "setrecursionlimit", "truncate", "ftruncate", "enable", "disable", "freeze"}
)  # fmt: skip


def changes(bound: Any, name: str) -> bool:
    """True if a method changes its native object."""
    if isinstance(bound, io.IOBase):
        return name not in _ASKING_FILES
    if name in ("__setitem__", "__delitem__"):
        return set_by_c(bound)
    return type(bound).__module__ in _WRITERS and not name.startswith("__")


def advances(bound: Any, name: str) -> bool:
    """True if a method consumes values of an iterator."""
    return is_iterator(bound) and name not in _ASKING_ITERATORS


def is_iterator(value: Any) -> bool:
    """True if a value is a native iterator, which gives each value once."""
    if isinstance(value, (io.IOBase, torch.Tensor)):
        return False
    return isinstance(value, Iterator) and not hasattr(type(value).__next__, "__code__")


def is_of_process(function: Any) -> bool:
    """True if a function changes the process or the file system."""
    module = getattr(function, "__module__", None)
    return module in ("posix", "nt", "sys", "gc") and function.__name__ in _OF_PROCESS


def is_file(value: Any) -> bool:
    return isinstance(value, io.IOBase)


def is_read_only(value: Any) -> bool:
    """True if a value is a file that can only be read."""
    return isinstance(value, io.IOBase) and not value.closed and not value.writable()


def is_changing_call(function: types.FunctionType, args: Any) -> bool:
    """True if an unobserved function of the standard library changes its first argument."""
    if function.__module__ == "logging" and args:
        return function.__name__ in _SETTINGS_OF_LOGS
    if function.__module__ == "threading" and args:
        return function.__name__ in _OF_THREADS and type(args[0]).__module__ == "threading"
    return False


_SETTINGS_OF_LOGS = frozenset(
    {"addHandler", "removeHandler", "setLevel", "addFilter", "removeFilter", "setFormatter"}
)


def is_lock(value: Any) -> bool:
    return type(value).__module__ == "_thread" and hasattr(value, "locked")


def set_by_c(value: Any) -> bool:
    """True if `value[key] = …` runs unknown C code."""
    if isinstance(value, (torch.Tensor, dict, list)) or type(value).__module__ == "numpy":
        return False
    method = getattr(type(value), "__setitem__", None)
    return isinstance(method, types.WrapperDescriptorType)


class ContextVariables:
    """The context variables that one trace uses."""

    def __init__(self, record: OutsideRecord) -> None:
        self._record = record
        self._held: dict[contextvars.ContextVar[Any], _Variable] = {}

    def method(
        self,
        name: str,
        variable: contextvars.ContextVar[Any],
        args: Sequence[Any],
        path: str,
        line: SourceLine,
    ) -> None:
        """Records a call of a context variable's method."""
        held = self._held.setdefault(variable, _Variable(variable))
        if name == "set":
            held.own = True
            self._record.unrepeated.variables[variable] = path, line
        elif name == "reset" and args and held.is_original(args[0]):
            held.own = False
            self._record.unrepeated.variables.pop(variable, None)
        elif name == "get" and not held.own:
            self._record.read(OutsidePlace("attribute", held, "value"), f"{path}.get()", line)


class _Variable:
    """The value of a context variable as an attribute. Kept by guards: no weak reference fits.

    Attributes:
        own: the step has set it, and not yet put back what was there.
    """

    __slots__ = ("_before", "_variable", "own")

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable, self._before, self.own = variable, variable.get(None), False

    @property
    def value(self) -> Any:
        return self._variable.get(None)

    def is_original(self, token: contextvars.Token[Any]) -> bool:
        """True if `reset(token)` restores the value from before the step."""
        return token.old_value is contextvars.Token.MISSING or token.old_value is self._before
