"""Changes of lists, queues and sets outside a step, which each of its calls makes again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

MUTABLE = frozenset({list, deque, set})
"""Containers whose changes are followed one by one."""


class ChangeByMethod(NamedTuple):
    """How a container is changed; the value that is put there, or taken out of it, is apart.

    Attributes:
        method: `append`, `appendleft`, `insert`, `add`, `discard`, `clear`, `pop`, `popleft`,
            `reverse`, `rotate` or `__delitem__`.
        before: the arguments of the method in front of the value.
        takes: whether it takes a value.
    """

    method: str
    before: tuple[Any, ...] = ()
    takes: bool = True

    @property
    def is_addition(self) -> bool:
        return self.takes and self.method != "discard"

    @property
    def is_of_one_item(self) -> bool:
        """Whether it puts one item into a list, takes one out of it, or moves them only."""
        if self.method == "__delitem__":
            return type(self.before[0]) is int
        return self.method != "clear"

    def make(self, container: Any, value: Any) -> None:
        """Change a container."""
        values = (value,) if self.takes else ()
        getattr(container, self.method)(*self.before, *values)


ADDING_ONE = {"extend": "append", "extendleft": "appendleft", "update": "add", "__iadd__": "append"}
"""Methods that add what they go through, and those that add one of it."""
_ONE_EACH = {**ADDING_ONE, "__ior__": "add", "difference_update": "discard"}
LISTED = (list, tuple, set, frozenset)
"""What all of it is known of, without going through it."""
_OF_A_VALUE = frozenset({"append", "appendleft", "add", "discard"})
_OF_NONE = frozenset({"clear", "popleft", "reverse", "pop", "rotate"})


def changes_of(method: str, args: Sequence[Any]) -> list[tuple[ChangeByMethod, Any]] | None:
    """The changes that a call of a method of a list, queue or set makes, and the value of each.

    Returns:
        None where it makes others, or where they depend on what is in the container.
    """
    if method in _OF_A_VALUE and len(args) == 1:
        return [(ChangeByMethod(method), args[0])]
    if method == "insert" and len(args) == 2 and type(args[0]) is int:
        return [(ChangeByMethod("insert", (args[0],)), args[1])]
    if method in _ONE_EACH and all(type(each) in LISTED for each in args):
        change = ChangeByMethod(_ONE_EACH[method])
        return [(change, value) for each in args for value in each]
    if method == "__delitem__" and len(args) == 1 and _is_index(args[0]):
        return [(ChangeByMethod(method, (args[0],), takes=False), None)]
    if method in _OF_NONE and all(type(each) is int for each in args):
        return [(ChangeByMethod(method, tuple(args), takes=False), None)]
    return None


def _is_index(key: Any) -> bool:
    if isinstance(key, slice):
        return all(each is None or type(each) is int for each in (key.start, key.stop, key.step))
    return type(key) is int


def put_back(container: Any, before: Iterable[Any]) -> None:
    """Give a list, queue or set the items that it had."""
    container.clear()
    add = container.update if isinstance(container, set) else container.extend
    add(before)


def is_changed_to(
    container: Any, before: Any, changes: Iterable[tuple[ChangeByMethod, Any]]
) -> bool:
    """Whether changes, and nothing else, have made of a container what it is.

    Args:
        before: a copy of it as it was.
    """
    expected = before.copy()
    try:
        for change, value in changes:
            change.make(expected, value)
    except (IndexError, TypeError):
        return False
    if isinstance(container, set):
        return set(map(id, expected)) == set(map(id, container))
    return len(expected) == len(container) and all(map(is_, expected, container))
