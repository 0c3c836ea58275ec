"""Lengths of lists outside a step that it asks for, and changes, and what it computes of them.

rows.append(loss.item())
if len(rows) > 100:          n = len(rows) is an input of the graph, n + 1 > 100 a condition
    rows.pop(0)
sum(rows), min(rows), rows[-2]    of what was there, other inputs, and of the number appended
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from graphopt.tracing.inputs import Number, PlacedNumber
from graphopt.tracing.outside import kept_lists
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original


class Lengths:
    """What a graph takes of lists that it changes, as the trace has it.

    Args:
        numbers: inputs of the graph, each with what stands for it.
        record: of the trace.
    """

    def __init__(self, numbers: Iterable[tuple[Number, Any]], record: Record) -> None:
        self._record = record
        placed = [(n.place, number) for n, number in numbers if isinstance(n, PlacedNumber)]
        self._known = {
            id(place.holder): (number, len(place.holder))
            for place, number in placed
            if place.kind == "size"
        }
        kinds = ("last", *kept_lists.FOLDS.values())
        self._kept = {place.identity: number for place, number in placed if place.kind in kinds}

    def of(self, container: Any) -> Any:
        """The length that a list has now; None where the graph does not take it."""
        if type(container) not in (list, deque) or id(container) not in self._known:
            return None
        number, before = self._known[id(container)]
        if not self._record.is_changed_by_items(container):
            number.exactly()
            return len(container)
        self._settle(container, number)
        more = len(container) - before
        return number + more if more else number

    def _settle(self, container: Any, number: Any) -> None:
        """Of a queue with a bound it depends on its length how many items make room for others: the
        graph holds where none do, or where it is full."""
        bound = getattr(container, "maxlen", None)
        more = self._record.additions(container)
        if bound is not None and more and not (number + more <= bound or number == bound):
            number.exactly()
        _, taken, _ = self._record.rest(container) or (None, 0, None)
        if taken and not number >= taken:
            number.exactly()

    def asked(self, callee: Any, args: Sequence[Any]) -> Any:
        """What is called in place of a function, or stands for a list where an instruction takes an
        item out of it; None where it is called itself."""
        if callee in (len, bool) and len(args) == 1:
            length = self.of(args[0])
            return _given(length if callee is len or length is None else bool(length))
        if callee is operator.getitem:
            return _given(self._item(*args)) if self._kept else None
        return self._fold(callee, args)

    def _item(self, container: Any, key: Any) -> Any:
        kept = kept_lists.item(self._record, container, key)
        if kept is None or kept.place is None:
            return None
        return self._kept.get(kept.place.identity)

    def _fold(self, callee: Any, args: Sequence[Any]) -> Any:
        kept = kept_lists.folded(self._record, callee, args)
        if kept is None:
            return None
        found = [] if kept.place is None else [self._kept.get(kept.place.identity)]
        if found == [None]:
            return None

        def fold(container: Any, **default: Any) -> Any:
            if kept_lists.FOLDS[original(callee)] == "sum":
                return sum(kept.added, *found)
            return callee([*found, *kept.added], **default)

        return fold


class _Gives:
    """Gives a number to whoever asks for a length, or takes an item out of it."""

    def __init__(self, number: Any) -> None:
        self._number = number

    def __call__(self, container: Any) -> Any:
        return self._number

    def __getitem__(self, key: Any) -> Any:
        return self._number


def _given(number: Any) -> Any:
    return None if number is None else _Gives(number)
