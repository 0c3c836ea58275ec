"""What a step adds to a list, queue or set by going through something, which gives it one by one.

self.scores.extend(scores.detach())                  the rows of a tensor
self.stats[key].extend(math.nan for _ in range(n))   what a generator gives
losses += map(float, losses_of_batch)

Each item is put there by a call of its own, in its order, as the methods do themselves: a generator
that asks the list how long it is finds what it has given so far, and one that raises has given the
items before.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphopt.host.changes import ADDING_ONE, LISTED
from graphopt.tracing.later_values import is_later
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original

_METHODS = (types.BuiltinMethodType, types.MethodDescriptorType)
_KINDS = (list, deque, set)

Follow = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a function in whose place it is called as an instruction of the step would call it."""


def adding_one_by_one(
    record: Record, callee: Any, args: Sequence[Any], follow: Follow
) -> Callable[..., None] | None:
    """What is called in place of a method that adds what it goes through, of which nobody knows
    what it gives before; None where the method itself is.

    Args:
        args: the object of a method that is taken from a class first.
    """
    callee = original(callee)
    if not isinstance(callee, _METHODS) or callee.__name__ not in ADDING_ONE:
        return None
    given = args if isinstance(callee, types.MethodDescriptorType) else (callee.__self__, *args)
    name = callee.__name__
    if len(given) != 2 or not is_gone_through(record, given[0], name, given[1]):
        return None

    def add(*values: Any) -> None:
        _add_each(given[0], name, values[-1], follow)

    return add


def is_gone_through(record: Record, container: Any, method: str, items: Any) -> bool:
    """Whether a method of a container outside takes what something gives one by one, which is no
    list."""
    if type(container) not in _KINDS or not hasattr(container, method):
        return False
    known = type(items) in LISTED or is_later(items) or not isinstance(items, Iterable)
    return not known and items is not container and record.is_outside(container)


class OneByOne:
    """Stands for a list or queue to which `+=` adds what it goes through.

    Args:
        follow: as above.
    """

    def __init__(self, container: Any, follow: Follow) -> None:
        self._container, self._follow = container, follow

    def __iadd__(self, items: Iterable[Any]) -> Any:
        _add_each(self._container, "__iadd__", items, self._follow)
        return self._container


def _add_each(container: Any, method: str, items: Iterable[Any], follow: Follow) -> None:
    add = follow(getattr(container, ADDING_ONE[method]))
    for each in follow(iter)(items):
        add(each)
