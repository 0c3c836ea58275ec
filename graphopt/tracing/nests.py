"""Going through nests of values: lists, dictionaries and the like within each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def parts(value: Any, is_nest: Callable[[Any], bool]) -> Iterator[Any]:
    """A value and all that is in it, nests included, which may be deep and contain themselves.

    Args:
        is_nest: whether to go into a value. Of a dictionary these are the values.
    """
    seen, pending = set[int](), [value]
    while pending:
        each = pending.pop()
        if not is_nest(each):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            yield each
            pending.extend(each.values() if isinstance(each, dict) else each)
