"""Lists of numbers that a step finds in a place, and leaves others of:

    self.data = [a + float(b) for a, b in zip(self.data, args)]

Their numbers are inputs, as those of tuples are, and so are tensors of a list. A step that does
more with a list than look at its items (that changes it in place, keeps it, asks which one it is)
needs the list itself.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from graphopt.tracing.inputs import Inputs, PlacedNumber
from graphopt.tracing.number_tuples import TupleTable
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record


class _NumberList(NamedTuple):
    """What stands for a list in one trace.

    Attributes:
        items: what was in it when the step began.
    """

    place: OutsidePlace
    value: list[Any]
    items: tuple[Any, ...]

    def is_left_alone(self, times_noted: int) -> bool:
        """Whether the step has not changed it, and holds it nowhere but in its place.

        Args:
            times_noted: how often others than the step hold it.
        """
        if len(self.value) != len(self.items):
            return False
        if any(one is not other for one, other in zip(self.value, self.items, strict=True)):
            return False
        other = _NumberList(self.place, [], ())
        in_place = int(self.place.now() is self.value)
        held = sys.getrefcount(self.value) - in_place - times_noted
        return held <= sys.getrefcount(other.value)


class NumberLists:
    """Those of one trace.

    Attributes:
        known: what stands for them, by id.
        places: where they are, by identity.
    """

    def __init__(self, found: Iterable[OutsidePlace]) -> None:
        self._found = [(place, place.now()) for place in found]
        self._lists: list[_NumberList] = []
        self.known: frozenset[int] = frozenset()
        self.places: frozenset[Hashable] = frozenset()

    def begin(self) -> None:
        """Stand-ins are in their places."""
        self._lists = list(_lists_at(place for place, _ in self._found))
        self.known = frozenset(id(each.value) for each in self._lists)
        self.places = frozenset(each.place.identity for each in self._lists)

    def needed(self, record: Record) -> frozenset[Hashable]:
        """The places, by their identities, of lists that the step needs themselves: it has given
        them to code that is not followed, asked which ones they are, changed or kept them, or has
        got to them in another way."""
        lists, self._lists = self._lists, []  # whose numbers nothing else is to hold
        needed = [place for place, value in self._found if record.path_to(value) is not None]
        needed += [
            each.place
            for each in lists
            if id(each.value) in record.needed_lists
            or not each.is_left_alone(record.times_found(each.value))
        ]
        return frozenset(place.identity for place in needed)


def places_of_lists(inputs: Inputs) -> Iterator[OutsidePlace]:
    """Where there are lists whose numbers, or tensors, are inputs."""
    numbers = inputs.hyperparameters
    found = [each.place for each in numbers if isinstance(each, PlacedNumber) and each.element]
    tables = (table for entry in inputs.module_tensors for table, _ in entry.slots)
    found += [table.place for table in tables if isinstance(table, TupleTable)]
    places = {place.identity: place for place in found}
    yield from (place for place in places.values() if type(place.now()) is list)


def _lists_at(places: Iterable[OutsidePlace]) -> Iterator[_NumberList]:
    for place in places:
        value = place.now()
        if type(value) is list:
            yield _NumberList(place, value, tuple(value))
