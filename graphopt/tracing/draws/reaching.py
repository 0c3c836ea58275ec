"""What the code of an iterator may use."""

from __future__ import annotations

import dis
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from graphopt.tracing.reachable import DRAWING_OR_COMMUNICATING, codes_in, names_in
from graphopt.tracing.source import is_installed, is_library_file

_MOST = 300_000


def reaches(iterator: Any, targets: Iterable[Any], kinds: tuple[type, ...] = ()) -> str | None:
    """The class of the first of some objects, or the first of some classes, that an iterator, or a
    function or class that it gets to, leads to; None where it leads to none. Modules of Python are
    not gone through, nor functions and classes of installed packages.
    """
    wanted = set(map(id, targets))
    for count, value in enumerate(_reached([iterator])):
        if id(value) in wanted or isinstance(value, kinds):
            return type(value).__name__
        if count > _MOST:
            return "more than can be looked through"
    return None


def may_be_apart(iterator: Any, called: Iterable[Any]) -> bool:
    """Whether an iterator has nothing in common with functions that are called behind it, so that
    it may be advanced before they are: no object that either could change, no variable of a module
    that these set, and no random numbers.

    Args:
        called: the functions, and what they are given.
    """
    own: dict[int, Any] = {}
    for count, value in enumerate(_reached(called)):
        if count > _MOST or (_is_function(value) and _sets_or_draws(value.__code__)):
            return False
        if _may_change(value):
            own[id(value)] = value
    for count, value in enumerate(_reached([iterator])):
        if count > _MOST or id(value) in own:
            return False
    return True


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """All that is met from some objects, each once."""
    seen: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept alive: no other object is to have its id
        yield value
        pending.extend(_parts(value))


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _sets_or_draws(code: types.CodeType) -> bool:
    """Whether code of the program sets variables of its module, or names what draws at random."""
    if _is_of_library(code):
        return False
    if not DRAWING_OR_COMMUNICATING.isdisjoint(names_in(code)):
        return True
    steps = (step for each in codes_in(code) for step in dis.get_instructions(each))
    return any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in steps)


def _may_change(value: Any) -> bool:
    """Whether something may be changed that two hold; functions and what Python keeps one of are
    held by many."""
    if isinstance(value, type):
        return _is_users(sys.modules.get(value.__module__))
    fixed = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType)
    if isinstance(value, (*fixed, tuple, frozenset, str, bytes, property, types.MethodType)):
        return False
    return gc.is_tracked(value) or hasattr(value, "__dict__")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, types.ModuleType):
        return ()
    named = value if _is_function(value) else type(value)
    if str(named.__module__).startswith("graphopt."):  # a captured step: not what its graphs hold
        return [getattr(value, "__wrapped__", None)]
    if isinstance(value, types.FunctionType):
        held: list[Any] = [
            value.__closure__,
            value.__defaults__,
            value.__kwdefaults__,
            value.__dict__,
        ]
        return [*held, *_named(value.__code__, value.__globals__)]
    if isinstance(value, type):
        return vars(value).values() if _is_users(sys.modules.get(value.__module__)) else ()
    if isinstance(value, types.GeneratorType):
        return [*_parts_of_frame(value.gi_frame), value.gi_yieldfrom]
    return [type(value), *(each for each in gc.get_referents(value) if _is_gone_through(each))]


def _parts_of_frame(frame: types.FrameType | None) -> Iterator[Any]:
    if frame is not None:
        yield from frame.f_locals.values()
        yield from _named(frame.f_code, frame.f_globals)


def _is_gone_through(value: Any) -> bool:
    return gc.is_tracked(value) or hasattr(value, "__dict__")


def _named(code: types.CodeType, variables: dict[str, Any]) -> Iterator[Any]:
    """What code of the user's names in its module."""
    if _is_of_library(code):
        return
    yield from (variables[name] for name in names_in(code) if name in variables)


def _is_of_library(code: types.CodeType) -> bool:
    return is_installed(code.co_filename) or is_library_file(code.co_filename)


def _is_users(module: Any) -> bool:
    if getattr(module, "__name__", "") in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None) or "<stdin>"
    return not (is_installed(file) or is_library_file(file))
