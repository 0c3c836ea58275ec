"""What a step leaves outside its arguments: tensors in attributes of `self`, and in dictionaries.

    self.fake = generator(z)         the graph returns the tensor, and every call puts it there
    self.hidden = cell(x, self.hidden)    the place is an input besides: it holds another tensor in
                                          each call, which is no reason to capture anew

Told from what is written there by the step's instructions (`outside`). What is put there by code
that is not followed, or into a list, is found later, and refused, as are numbers (`.item()`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.besides import Finder
from graphopt.tracing.outside.places import MISSING
from graphopt.tracing.outside.record import Record, WrittenItem
from graphopt.tracing.signature import SYMBOLIC


@dataclass(frozen=True)
class Placed:
    """A traced value that the step has left in an item of a dictionary."""

    path: str
    table: dict[Any, Any]
    key: Any
    value: Any


def take_placed(
    record: Record,
    finder: Finder,
    stand_ins: Mapping[int, torch.Tensor],
    tables: Iterable[dict[str, Any]],
) -> list[Placed]:
    """Take out what a traced step has put into places outside; there is then what was before. Where
    the step finds a tensor in such a place, and leaves another one, the finder takes note.

    Args:
        record: of the step, which is not finished yet.
        stand_ins: of the inputs, by the id of the real tensor.
        tables: those that are looked after otherwise.
    """
    others = set(map(id, tables))
    found = []
    for item in list(record.written_items()):
        value = item.place.now()
        if id(item.place.holder) in others or not _is_traced(value):
            continue
        _put_back(item)
        before = item.before
        if isinstance(before, torch.Tensor) and value is _stand_in(before, stand_ins, finder):
            continue  # which has been updated in place
        record.pin(item.place.holder if item.owner is None else item.owner)
        path = item.path + (f"[{item.place.key!r}]" if item.owner is None else f".{item.place.key}")
        if _is_found(record, item):
            finder.carries(path, item.place.holder, item.place.key)
        found.append(Placed(path, item.place.holder, item.place.key, value))
    return found


def _stand_in(tensor: torch.Tensor, known: Mapping[int, torch.Tensor], finder: Finder) -> Any:
    return known.get(id(tensor), finder.stand_in_of(tensor))


def _is_traced(value: Any) -> bool:
    """Whether a value is, or contains, a traced tensor, and no traced number."""
    leaves = [] if value is MISSING else _compat.tree_leaves(value)
    return any(map(_compat.is_fake, leaves)) and not any(isinstance(x, SYMBOLIC) for x in leaves)


def _put_back(item: WrittenItem) -> None:
    if item.before is MISSING:
        del item.place.holder[item.place.key]
    else:
        item.place.holder[item.place.key] = item.before


def _is_found(record: Record, item: WrittenItem) -> bool:
    """Whether the step uses the tensor that it finds where it leaves another one."""
    before = item.before
    if not isinstance(before, torch.Tensor) or _compat.is_fake(before):
        return False
    return record.has_read(item.place) or record.path_to(before) is not None
