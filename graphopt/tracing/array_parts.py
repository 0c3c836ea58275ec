"""Arrays that each call computes: parts that a step takes, and what changes them in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from graphopt.tracing.arrays import changes_first


class OnCopy:
    """Gives a copy of an array as a function leaves it that changes it in place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, "on_copy"

    def __call__(self, array: Any, *args: Any) -> Any:
        array = array.copy()
        self.function(array, *args)
        return array

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(vars(other) == vars(self))

    def __hash__(self) -> int:
        return hash(self.function)


def copied_item(array: Any, key: Any) -> Any:
    """A part of an array of its own."""
    item = array[key]
    return item.copy() if hasattr(item, "copy") else item


def without_ranges(key: Any) -> Any:
    """A key in which lists stand for ranges."""
    if type(key) is tuple:
        return tuple(map(without_ranges, key))
    return list(key) if type(key) is range else key


def changing_first(callee: Any, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A function of numpy's that changes its first argument, with all of these; none of another."""
    numpy, of = sys.modules.get("numpy"), getattr(callee, "__self__", None)
    if numpy is None or len(args) < 2:
        return None, []
    if changes_first(callee) and getattr(numpy, callee.__name__, None) is callee:
        return callee, list(args)
    if getattr(callee, "__name__", "") != "at":
        return None, []
    given = [of, *args] if type(of).__module__ == "numpy" else list(args)
    return (given[0].at, given[1:]) if isinstance(given[0], numpy.ufunc) else (None, [])
