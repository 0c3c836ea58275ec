"""Places in objects in whose place a program puts others between two calls, as in each epoch.

    losses = AverageMeter()                       another one in each epoch
    step(images, losses)                          losses.sum += loss.item()

The graph that reads and changes `losses.sum` does so in the object that its guard has found in this
call, by the way by which the step has got to the object when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from enum import Enum
from types import CellType, SimpleNamespace
from typing import Any

from graphopt._compat.classes import is_made_by_statement
from graphopt.tracing.outside.held import GuardedObject, can_follow
from graphopt.tracing.outside.places import MISSING, OutsidePlace, attributes_of, is_value
from graphopt.tracing.outside.record import Record


class MovingPlace(OutsidePlace):
    """A place in an object that a guard finds in each call."""

    def __init__(self, kind: str, held: GuardedObject, key: Any) -> None:
        for name, value in (("kind", kind), ("_held", held), ("key", key)):
            object.__setattr__(self, name, value)

    @property
    def holder(self) -> Any:
        """The object, or its attributes, or the container, of the last call that fits."""
        return self._held.get()  # type: ignore[attr-defined]


class GivenPlace(MovingPlace):
    """Where an object among the arguments is, which a guard finds in each call."""

    def now(self) -> Any:
        """The object of the last call that fits."""
        return self.holder


class MovingTable(MutableMapping[Any, Any]):
    """The dictionary that a guard finds in each call."""

    def __init__(self, holder: Callable[[], Any]) -> None:
        self._holder = holder

    def _table(self) -> dict[Any, Any]:
        found = self._holder()
        return {} if found is MISSING else found

    def __getitem__(self, key: Any) -> Any:
        return self._table()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._table()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._table()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


def is_object(value: Any) -> bool:
    """Whether an argument is an object of the program's own, which is nothing but its attributes:
    what the step does with it is seen."""
    if isinstance(value, Enum) or is_value(value) or callable(value):
        return False
    if type(value).__module__.partition(".")[0] == "numpy":
        return False
    plain = is_made_by_statement(type(value)) or type(value) is SimpleNamespace
    return bool(plain) and can_follow(value)


def pin_others(record: Record, places: list[OutsidePlace]) -> None:
    """Let each call need the very objects in which such places are, where the guard could not find
    other ones for them."""
    for place in places:
        if not _is_found(record, place):
            record.need(place.holder)
            record.need(record.owner(place.holder))


def _is_found(record: Record, place: OutsidePlace) -> bool:
    """Whether a guard would find the object that a place belongs to wherever it is when a call
    begins: the step has got to it by places that the guard looks at."""
    holder, owner = place.holder, record.owner(place.holder)
    if isinstance(holder, CellType) or place.kind not in _KINDS:
        return False
    if owner is not None and attributes_of(owner) is not holder:
        return False
    root = holder if owner is None else owner
    if record.is_pinned(holder) or record.is_pinned(root) or not can_follow(root):
        return False
    return any(each.kind in LEADING for each in record.places_of(root))


_KINDS = frozenset({"item", "attribute", "size"})

LEADING = frozenset({"item", "class", "attribute", "cell", "target"})
"""Kinds of places where an object is, rather than what is found out about one."""
