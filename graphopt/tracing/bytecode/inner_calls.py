"""Calls of an object that calls another function: which one, and with what.

partial(time.time)()                      calls time.time()
time.time.__call__()                      calls time.time()
operator.call(id, tensor)                 calls id(tensor)
methodcaller("time")(time)                calls time.time()
Clock(), of `__call__ = time.time`        calls time.time()
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.tracing.interception.replaced_functions import is_in, original, passing

_CALLING = frozenset(
    {iter, sorted, min, max, list.sort, defaultdict, functools.cmp_to_key, itertools.accumulate,
     itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.groupby}
)  # fmt: skip
"""Functions and classes of C that call a function among their arguments, and not at once with
arguments that are known."""
_OPERATOR_CALL = getattr(operator, "call", None)  # from Python 3.11 on


@dataclass(frozen=True)
class InnerCall:
    """A call that another one comes to.

    Attributes:
        function: that is called.
        args: positional values, and those of keywords.
        around: gives what calls another function in its place, as the outer callee calls this one.
    """

    function: Any
    args: list[Any]
    around: Callable[[Any], Callable[..., Any]]


def inner_call(callee: Any, args: Sequence[Any]) -> InnerCall | None:
    """The call that a call comes to; None where the callee does its work itself.

    Args:
        args: positional values, the object of a method first, and those of keywords.
    """
    if isinstance(callee, functools.partial):
        given, named = callee.args, callee.keywords
        values = [*given, *args, *named.values()]
        return InnerCall(callee.func, values, lambda f: functools.partial(f, *given, **named))
    if isinstance(callee, types.MethodWrapperType) and callee.__name__ == "__call__":
        return InnerCall(callee.__self__, list(args), lambda f: f)
    if callee is _OPERATOR_CALL and args:
        return InnerCall(args[0], list(args[1:]), _with_function)
    if isinstance(callee, operator.methodcaller) and args:
        return _of_caller(callee, args[0])
    if isinstance(callee, types.MethodType) and _is_native(callee.__func__):
        owner = callee.__self__
        return InnerCall(callee.__func__, [owner, *args], lambda f: functools.partial(f, owner))
    if isinstance(callee, functools._lru_cache_wrapper):
        wrapped = callee.__wrapped__
        if _is_native(wrapped):  # nobody knows whether the step has made it
            return InnerCall(wrapped, list(args), lambda f: f)
    of_class = getattr(type(callee), "__call__", None)  # noqa: B004 - what it is, if any
    if _is_native(of_class):
        return InnerCall(of_class, list(args), lambda f: f)
    return None


def _of_caller(caller: operator.methodcaller, owner: Any) -> InnerCall | None:
    reduced: Any = caller.__reduce__()
    kind, given = reduced[:2]
    if kind is not operator.methodcaller:  # with keywords
        return None
    name, *args = given
    function = inspect.getattr_static(owner, name, None)
    if isinstance(function, staticmethod):
        function = function.__func__
    if not _is_native(function):
        return None
    return InnerCall(function, args, lambda f: _on_any(functools.partial(f, *args)))


def _is_native(function: Any) -> bool:
    """Whether a function has no Python code whose instructions show what it calls."""
    if isinstance(function, (types.MethodType, staticmethod)):
        return _is_native(function.__func__)
    python = (types.FunctionType, types.WrapperDescriptorType, type)
    return callable(function) and not isinstance(function, python)


def _with_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is called as `operator.call` is."""

    @passing
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _on_any(function: Callable[[], Any]) -> Callable[[Any], Any]:
    """What is called with an object that it does not need."""

    @passing
    def call(_: Any) -> Any:
        return function()

    return call


def called_within(callee: Any, args: Sequence[Any]) -> Iterator[int]:
    """The positions of functions that a function of C calls when it likes: `sorted(key=…)`."""
    if is_in(original(callee), _CALLING) and not (callee is iter and len(args) == 1):
        yield from (number for number, value in enumerate(args) if callable(value))
