"""Sums of lists outside a step that it adds numbers to, for means over all calls or the last ones.

losses.append(loss.item())
sum(losses) / len(losses)        what `sum` gives before the call is an input of the graph

Exact where `sum` adds from left to right, without a compensation of the rounding errors.
"""

from __future__ import annotations

import sys
from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.places import MISSING, OutsidePlace
from graphopt.tracing.outside.record import Record

_FROM_LEFT_TO_RIGHT = sys.version_info < (3, 12)


def summed(record: Record, container: Any) -> tuple[OutsidePlace, list[Any]] | None:
    """What a list outside held before the step that is in it now, as a place of its sum, and the
    numbers that the step has added; None where it is not made of both."""
    if type(container) is not list or not record.is_outside(container):
        return None
    rest = record.rest(container)
    if rest is None or record.behind is not None:
        return None
    before, taken, added = rest
    if not all(type(each) in (int, float) or isinstance(each, SYMBOLIC) for each in added):
        return None
    found = OutsidePlace("sum", before, taken).now()
    if found is MISSING or not (_FROM_LEFT_TO_RIGHT or type(found) is int):
        return None
    return OutsidePlace("sum", container, taken), added


def reads_sum(record: Record, container: Any, line: SourceLine) -> bool:
    """The step asks for a sum. Returns whether it is of such a list."""
    found = summed(record, container)
    if found is None:
        return False
    place, _ = found
    if not record.is_input(place):
        path = record.path(container, "list")
        record.read(place, f"sum({path})", line)
    return True
