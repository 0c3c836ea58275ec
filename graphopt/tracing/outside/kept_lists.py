"""What a step computes of lists and queues outside it that it appends numbers to: sums, the
smallest and the largest, and items counted from the end.

losses.append(loss.item())
sum(losses) / len(losses)        what `sum` gives before the call is an input of the graph
min(losses)                      so is this, which the number appended may undercut
losses[-1], losses[-2]           the number appended, and what was the last one before

Sums are exact where `sum` adds from left to right, without a compensation of the rounding errors.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from graphopt.ir.source import SourceLine
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.places import MISSING, OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original

_FROM_LEFT_TO_RIGHT = sys.version_info < (3, 12)
FOLDS: dict[Any, str] = {builtins.sum: "sum", builtins.min: "min", builtins.max: "max"}
"""Functions of all items, one after the other, each with the kind of place of what it gives."""


class Kept(NamedTuple):
    """What a step asks of a list: a place of what was there before it, and the numbers that it has
    added; of one item, either.

    Attributes:
        exact: it is so for a list of this length alone.
        taken: how many items have to have been there.
    """

    place: OutsidePlace | None
    added: list[Any]
    exact: bool = False
    taken: int = 0


def folded(record: Record, callee: Any, args: Sequence[Any]) -> Kept | None:
    """What is asked by a function of all items, of which the smallest and the largest may be given
    another value by default; None where it is not made of both, or no number."""
    container, *default = args or [None]
    function: Any = original(callee)
    kind = FOLDS.get(function) if type(function) is BuiltinFunctionType else None
    if default and (kind == "sum" or len(default) > 1 or not _is_number(default[0])):
        return None
    rest = None if kind is None else _rest(record, container)
    if rest is None or kind is None:
        return None
    before, taken, added = rest
    if not all(map(_is_number, added)):
        return None
    if len(before) == taken and kind != "sum":
        return Kept(None, added, exact=True) if added or default else None
    found = OutsidePlace(kind, before, taken).now()
    if found is MISSING or (kind == "sum" and type(found) is float and not _FROM_LEFT_TO_RIGHT):
        return None
    return Kept(OutsidePlace(kind, container, taken), added)


def item(record: Record, container: Any, key: Any) -> Kept | None:
    """What is asked by `container[key]`, counted from the end; None where that is no number."""
    if type(key) is not int or key >= 0:
        return None
    rest = _rest(record, container)
    if rest is None:
        return None
    before, taken, added = rest
    if -key <= len(added):
        return Kept(None, [added[key]], taken=taken)
    behind = (-key - len(added), taken)
    if OutsidePlace("last", before, behind).now() is MISSING:
        return None
    return Kept(OutsidePlace("last", container, behind), [])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, SYMBOLIC)


def _rest(record: Record, container: Any) -> tuple[Any, int, list[Any]] | None:
    return record.rest(container) if record.is_outside(container) else None


def reads(record: Record, kept: Kept, container: Any, asked: str, line: SourceLine) -> None:
    """The step asks for something.

    Args:
        asked: how a message calls it; the list is put there.
    """
    path = record.path(container, type(container).__name__)
    record.reads_behind(container, path, line)
    if kept.place is not None and not record.is_input(kept.place):
        record.read(kept.place, asked.format(path), line)
    by_size = kept.taken or getattr(container, "maxlen", None) is not None
    if kept.exact:
        record.size(container, path, line)
    elif by_size:
        record.asks_length(container, path, line)
