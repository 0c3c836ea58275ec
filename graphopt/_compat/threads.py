"""The threads that work for the running trace, and the lock between traces.

Functions of torch and Python that a trace replaces are the process's, and other threads call them
as well: they train, load and evaluate something else meanwhile. So whatever is replaced asks who
calls. A trace runs in one thread, and in those that autograd has for devices while they go back for
it: autograd hands them what torch keeps for a thread, the mark of the trace included.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

_KEY = "graphopt.trace"
_turns = threading.RLock()


def _keep(mark: object) -> None:
    """Stores a mark for the calling thread, and for autograd threads that work for it."""
    if _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mark))
    torch._C._stash_obj_in_tls(_KEY, mark)


@cache
def _takes_references() -> bool:
    """True if torch releases a stored thread-local object without having counted it, as torch
    2.11 does."""
    probe = object()
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # for torch, if it takes one
    torch._C._stash_obj_in_tls(f"{_KEY}.probe", probe)
    return sys.getrefcount(probe) == before + 1


def mark_of_trace() -> object | None:
    """The mark of the trace that the calling thread works for, or None."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    mark: object | None = torch._C._get_obj_in_tls(_KEY)
    return mark


def is_of_trace() -> bool:
    """True if the calling thread works for a trace."""
    return mark_of_trace() is not None


@contextmanager
def taking_turns() -> Iterator[None]:
    """While active, this thread alone traces; other traces and `torch.compile` wait, since they
    share machinery.

    A trace within a trace is a part of it. Nothing that waits for another process may run inside.
    """
    if is_of_trace():
        yield
        return
    # always in this order, in which a backend of `torch.compile` takes them as well
    with _turns_of_compilers(), _turns:
        _keep(object())
        try:
            yield
        finally:
            _keep(None)


@contextmanager
def no_trace_elsewhere() -> Iterator[None]:
    """While active, no other thread traces: the functions of torch are the process's own again.

    Nothing that waits for another process may run inside.
    """
    with _turns_of_compilers(), _turns:
        yield


def _turns_of_compilers() -> Any:
    """The lock that `torch.compile` holds while it compiles."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def _free_in_child() -> None:
    """Releases the lock in a forked child, where the tracing thread does not run."""
    _turns._at_fork_reinit()  # type: ignore[attr-defined]
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None:
        dynamo.compile_lock._at_fork_reinit()
    if is_of_trace():
        _keep(None)


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_free_in_child)


def other_threads_run() -> bool:
    """True if other threads run Python code, and may draw random numbers."""
    mine = threading.get_ident()
    return any(each != mine for each in sys._current_frames())


class Replacement:
    """A function that is replaced by another in the threads of the running trace only.

    Args:
        value: the other one.
        former: itself, which all other threads call.

    Attributes:
        function: the function that replaces both.
    """

    def __init__(self, value: Callable[..., Any], former: Callable[..., Any]) -> None:
        mark = mark_of_trace()
        assert mark is not None, "only a trace replaces anything"
        self._held = held = [value]

        def call(*args: Any, **kwargs: Any) -> Any:
            function = former
            if mark_of_trace() is mark and held:
                function = held[0]
            return function(*args, **kwargs)

        self.function = call

    def end(self) -> None:
        """Drops references to the trace: a call by another thread may outlast it."""
        self._held.clear()


def _code_of_replacements() -> CodeType:
    codes = (each for each in Replacement.__init__.__code__.co_consts)
    return next(each for each in codes if isinstance(each, CodeType))


CODE = _code_of_replacements()
"""The code of all functions that stand in the place of two."""


def former_of(value: Any) -> Any:
    """The original of a replaced function; any other value is returned unchanged."""
    if type(value) is not FunctionType or value.__code__ is not CODE:
        return value
    assert value.__closure__ is not None
    return value.__closure__[CODE.co_freevars.index("former")].cell_contents


class TrueInTrace:
    """A flag that is true in the threads of the running trace only."""

    def __init__(self) -> None:
        self._mark = mark_of_trace()

    def __bool__(self) -> bool:
        return mark_of_trace() is self._mark
