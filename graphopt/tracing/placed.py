"""What a step leaves outside its arguments: tensors in attributes of `self`, and in dictionaries.

    self.fake = generator(z)         the graph returns the tensor, and every call puts it there
    self.hidden = cell(x, self.hidden)    the place is an input besides: it holds another tensor in
                                          each call, which is no reason to capture anew

Told from what is written there by the step's instructions (`outside`). What is put there by code
that is not followed, or into a list, is found later, and refused, as are numbers (`.item()`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.tracing.besides import CarriedPlace, Finder
from graphopt.tracing.call import Call
from graphopt.tracing.inputs import is_exact
from graphopt.tracing.outside.attributes import attributes_of
from graphopt.tracing.outside.places import MISSING, key_text
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
        path = item.path + (
            f"[{key_text(item.place.key)}]" if item.owner is None else f".{item.place.key}"
        )
        if _is_found(record, item):
            finder.carries(path, item.place.holder, item.place.key)
        found.append(Placed(path, item.place.holder, item.place.key, value))
    return found


def _stand_in(tensor: torch.Tensor, known: Mapping[int, torch.Tensor], finder: Finder) -> Any:
    return known.get(id(tensor), finder.stand_in_of(tensor))


def _is_traced(value: Any) -> bool:
    """Whether a value is, or contains, a traced tensor, and no traced number. A nest that contains
    itself cannot be made anew, and is left to be refused."""
    leaves, pending = [], [(value, frozenset[int]())]
    while pending:
        each, within = pending.pop()
        if not isinstance(each, (list, tuple, dict)):
            leaves.append(each)
        elif id(each) in within:
            return False
        else:
            inner = each.values() if isinstance(each, dict) else each
            pending.extend((item, within | {id(each)}) for item in inner)
    return any(map(_compat.is_fake, leaves)) and not any(isinstance(x, SYMBOLIC) for x in leaves)


def _put_back(item: WrittenItem) -> None:
    if item.before is MISSING:
        del item.place.holder[item.place.key]
    else:
        item.place.holder[item.place.key] = item.before


def _is_found(record: Record, item: WrittenItem) -> bool:
    """Whether the step uses the tensor that it finds where it leaves another one, and finds it
    nowhere else."""
    before = item.before
    if not isinstance(before, torch.Tensor) or _compat.is_fake(before):
        return False
    places = record.places_of(before)
    return all(place.identity == item.place.identity for place in places) and (
        bool(places) or record.path_to(before) is not None
    )


class FoundPlace(NamedTuple):
    """An item of a dictionary in which a step has found a tensor, or a number. Neither the object
    whose attribute it is nor the tensor is kept alive.

    Attributes:
        holder: gives that object, or the dictionary.
        value: the number, or a weak reference to the tensor.
    """

    path: str
    holder: Callable[[], Any]
    key: Any
    value: Any

    @property
    def table(self) -> dict[Any, Any]:
        """The dictionary; an empty one where the object is gone."""
        holder = self.holder()
        return holder if isinstance(holder, dict) else attributes_of(holder) or {}

    def is_changed(self) -> bool:
        """Whether another tensor, or another number of its kind, is there now."""
        now = self.table.get(self.key)
        if isinstance(self.value, weakref.ref):
            return isinstance(now, torch.Tensor) and now is not self.value()
        return type(now) is type(self.value) and is_exact(now) and now != self.value


def found_places(record: Record, call: Call) -> Iterator[FoundPlace]:
    """Where a step has found tensors, each in one place, and numbers."""
    for read in record.reads.values():
        value = read.value
        if not read.place.is_item or not (is_exact(value) or _is_in_one_place(record, value)):
            continue
        kept = weakref.ref(value) if isinstance(value, torch.Tensor) else value
        yield FoundPlace(read.path, _holder(record, read.place.holder), read.place.key, kept)
    for name, module in call.named_submodules():
        for key, value in vars(module).items():
            if is_exact(value):
                yield FoundPlace(f"{name}.{key}".strip("."), weakref.ref(module), key, value)


def _is_in_one_place(record: Record, value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor) and not value.requires_grad
    return tensor and len(record.places_of(value)) == 1


def _holder(record: Record, table: dict[Any, Any]) -> Callable[[], Any]:
    owner = record.owner(table)
    if owner is None:
        return lambda: table
    try:
        return weakref.ref(owner)
    except TypeError:  # of some kinds there are no weak references
        return lambda: owner


def changing(captured: Iterable[Sequence[FoundPlace]]) -> list[CarriedPlace]:
    """Places to be inputs from now on: those of tensors that are others than in an earlier graph,
    and those of numbers that are others than in two."""
    times: Counter[tuple[int, Any]] = Counter()
    found: dict[tuple[int, Any], CarriedPlace] = {}
    for places in captured:
        for each in filter(FoundPlace.is_changed, places):
            table = each.table
            known = (id(table), each.key)
            times[known] += 2 if isinstance(each.value, weakref.ref) else 1
            found[known] = (each.path, table, each.key)
    return [place for known, place in found.items() if times[known] > 1]
