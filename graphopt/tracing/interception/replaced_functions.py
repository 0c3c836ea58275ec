"""Temporary replacement of torch and Python functions, only in the threads of a trace.

with replaced((math, "sqrt", traced_sqrt)):
    math.sqrt(x)    ==>    traced_sqrt(x)    in the trace
                           sqrt(x)           in other threads
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from graphopt._compat.threads import CODE, Replacement

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MISSING = object()
_passing: set[CodeType] = {CODE}
"""Code of functions that call others for the step's own code, as if it stood there."""
_replaced: dict[int, Any] = {}
"""By the ids of functions of modules: those that stand in their place while a step is traced."""


def original(function: Any) -> Any:
    """The original of a replaced function; any other value unchanged."""
    is_function = isinstance(function, FunctionType)
    return getattr(function, "stands_for", function) if is_function else function


def replacement(function: Any) -> Callable[..., Any] | None:
    """What stands in the place of a function of a module while a step is traced, under whatever
    name it is asked for (`now = time.time`); None where nothing does."""
    return _replaced.get(id(function))


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While active, each `(owner, name, value)` is set in the threads of the running trace only. In
    other threads they always do.

    Args:
        changes: functions; a name that a class or module has only from elsewhere is removed again.
            What is no function has to ask for itself who looks at it (`is_of_trace`).
    """
    before: list[tuple[Any, str, Any]] = []
    stand_ins: list[Replacement] = []
    known = dict(_replaced)
    try:
        for owner, name, value in changes:
            former: Any = getattr(owner if hasattr(owner, name) else builtins, name)
            before.append((owner, name, vars(owner).get(name, _MISSING)))
            if callable(value):
                stand_ins.append(Replacement(value, former))
                value = _named(stand_ins[-1].function, value, former)
                if isinstance(owner, ModuleType) and not isinstance(former, type):
                    _replaced[id(_first(former))] = value
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, raw in reversed(before):
            if raw is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, raw)
        _replaced.clear()
        _replaced.update(known)
        for each in stand_ins:
            each.end()


@contextmanager
def assigned(owner: Any, **attributes: Any) -> Iterator[None]:
    """While active, an object has these attributes."""
    before = {name: getattr(owner, name) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(before)


def _first(function: Any) -> Any:
    """The function of the program's behind any number of replacements."""
    while (behind := original(function)) is not function:
        function = behind
    return function


def is_in(callee: Any, functions: frozenset[Any]) -> bool:
    """True if a callee, hashable or not, is among functions."""
    try:
        return callee in functions
    except TypeError:
        return False


def _named(call: Any, value: Callable[..., Any], former: Callable[..., Any]) -> Any:
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(call, name, getattr(value, name, None) or "replaced")
    if isinstance(value, FunctionType):
        vars(value)["stands_for"] = former
        vars(call).update(vars(value))
    vars(call)["stands_for"] = former
    return call


def calling_frame(depth: int = 1) -> FrameType:
    """The frame that called a replaced function, to be asked from the replacement; `depth - 1`
    frames further out."""
    frame = _outside(sys._getframe(2))
    for _ in range(depth - 1):
        assert frame.f_back is not None
        frame = _outside(frame.f_back)
    return frame


def passing(function: _Function) -> _Function:
    """Decorates a function that calls another one for the step's own code, as if it stood there."""
    _passing.add(function.__code__)
    return function


def passes(code: CodeType) -> bool:
    """Whether code only calls something else for the step's own code."""
    return code in _passing


def _outside(frame: FrameType) -> FrameType:
    while passes(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame
