"""Lengths and sums of lists outside a step that it asks for, and changes.

rows.append(loss.item())
if len(rows) > 100:          n = len(rows) is an input of the graph, n + 1 > 100 a condition
    rows.pop(0)
sum(rows)                    of what was there, another input, and the number appended
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphopt.tracing.inputs import Number, PlacedNumber
from graphopt.tracing.outside.record import Record
from graphopt.tracing.outside.sums import summed


class Lengths:
    """The lengths that a graph takes, as the trace has them.

    Args:
        numbers: inputs of the graph, each with what stands for it.
        record: of the trace.
    """

    def __init__(self, numbers: Iterable[tuple[Number, Any]], record: Record) -> None:
        self._record, numbers = record, list(numbers)
        self._known = {
            id(number.place.holder): (stand_in, len(number.place.holder))
            for number, stand_in in numbers
            if isinstance(number, PlacedNumber) and number.place.kind == "size"
        }

        self._sums = {
            number.place.identity: stand_in
            for number, stand_in in numbers
            if isinstance(number, PlacedNumber) and number.place.kind == "sum"
        }

    def of(self, container: Any) -> Any:
        """The length that a list has now; None where the graph does not take it."""
        if type(container) is not list or id(container) not in self._known:
            return None
        number, before = self._known[id(container)]
        if not self._record.is_changed_by_items(container):
            number.exactly()
            return len(container)
        more = len(container) - before
        return number + more if more else number

    def asked(self, callee: Any, args: Sequence[Any]) -> Callable[[Any], Any] | None:
        """What is called in place of `len` or `sum`; None where it is called itself."""
        if callee not in (len, sum) or len(args) != 1:
            return None
        number = self.of(args[0]) if callee is len else self._sum(args[0])
        return None if number is None else lambda container: number

    def _sum(self, container: Any) -> Any:
        found = summed(self._record, container) if self._sums else None
        number = None if found is None else self._sums.get(found[0].identity)
        return None if number is None or found is None else sum(found[1], number)
