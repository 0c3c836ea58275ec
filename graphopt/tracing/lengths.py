"""Lengths of lists outside a step that it asks for, and changes.

rows.append(loss.item())
if len(rows) > 100:          n = len(rows) is an input of the graph, n + 1 > 100 a condition
    rows.pop(0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphopt.tracing.inputs import Number, PlacedNumber
from graphopt.tracing.outside.record import Record


class Lengths:
    """The lengths that a graph takes, as the trace has them.

    Args:
        numbers: inputs of the graph, each with what stands for it.
        record: of the trace.
    """

    def __init__(self, numbers: Iterable[tuple[Number, Any]], record: Record) -> None:
        self._record = record
        self._known = {
            id(number.place.holder): (stand_in, len(number.place.holder))
            for number, stand_in in numbers
            if isinstance(number, PlacedNumber) and number.place.kind == "size"
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
        """What is called in place of `len`; None where it is called itself."""
        number = self.of(args[0]) if callee is len and len(args) == 1 else None
        return None if number is None else lambda container: number
