"""Parts of arrays that a step takes, and changes, where each call computes the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
