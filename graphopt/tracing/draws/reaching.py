"""What the code of an iterator may use."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from graphopt.tracing.reachable import names_in
from graphopt.tracing.source import is_installed, is_library_file

_MOST = 300_000


def reaches(iterator: Any, targets: Iterable[Any], kinds: tuple[type, ...] = ()) -> str | None:
    """The class of the first of some objects, or the first of some classes, that an iterator, or a
    function or class that it gets to, leads to; None where it leads to none. Modules of Python are
    not gone through, nor functions and classes of installed packages.
    """
    wanted = set(map(id, targets))
    seen: dict[int, Any] = {}
    pending = [iterator]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        if id(value) in wanted or isinstance(value, kinds):
            return type(value).__name__
        seen[id(value)] = value  # kept alive: no other object is to have its id
        if len(seen) > _MOST:
            return "more than can be looked through"
        pending.extend(_parts(value))
    return None


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, types.ModuleType):
        return ()
    if type(value).__module__ == "graphopt.step":  # a captured step: not what its graphs hold
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
    if is_installed(code.co_filename) or is_library_file(code.co_filename):
        return
    yield from (variables[name] for name in names_in(code) if name in variables)


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None) or "<stdin>"
    return not (is_installed(file) or is_library_file(file))
