"""Detection of values that hold the right elements at the wrong positions.

cat([a[:4], a[4:]])  ->  cat([a[4:], a[:4]])        element 0 is a[4], before it was a[0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphopt.verify.values.elementwise import aligned
from graphopt.verify.values.terms import Segment, TensorValue


class MovedElements(NamedTuple):
    """The first position where another element of the same term stands.

    Attributes:
        place: the position in the tensor.
        term: the term of both elements.
        was, now: the index of the element in the term.
    """

    place: int
    term: int
    was: int
    now: int


def moved_elements(one: Any, other: Any) -> MovedElements | None:
    """Returns the first moved element of two values or keys, or None if they differ otherwise."""
    if isinstance(one, TensorValue) and isinstance(other, TensorValue):
        return _in_rows(one.segments, other.segments)
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return None
    if one[:1] == other[:1] == ("each",):
        return _in_runs(one, other)
    for a, b in zip(one, other, strict=False):
        found = moved_elements(a, b)
        if found is not None:
            return found
    return None


def first_difference(
    one: Sequence[Segment], other: Sequence[Segment]
) -> tuple[int, Segment, Segment] | None:
    """Returns the position of the first differing elements of two rows, and segments that begin
    with them, or None."""
    place = 0
    for was, now in aligned([one, other]):
        if was != now:
            return place, was, now
        place += was.length
    return None


def _in_rows(one: Sequence[Segment], other: Sequence[Segment]) -> MovedElements | None:
    found = first_difference(one, other)
    if found is None or found[1].term != found[2].term:
        return None
    return MovedElements(found[0], found[1].term, found[1].start, found[2].start)


def _in_runs(one: tuple[Any, ...], other: tuple[Any, ...]) -> MovedElements | None:
    """Finds an operand of two elementwise keys that is shifted against the first operand."""
    old, new = ([entry for _, entry in key[3:] if _is_operand(entry)] for key in (one, other))
    if one[1:3] != other[1:3] or [entry[1] for entry in old] != [entry[1] for entry in new]:
        return None
    was, now = ([entry[3] if len(entry) > 3 else 0 for entry in run] for run in (old, new))
    for entry, before, after in zip(new, was, now, strict=True):
        if after != before:
            place = max(0, -before, -after)
            return MovedElements(place, entry[1], before + place, after + place)
    return None


def _is_operand(entry: Any) -> bool:
    return isinstance(entry, tuple) and entry[:1] == ("elements",)
