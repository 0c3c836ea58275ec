"""Where steps find tensors and numbers; what is another one in later calls becomes an input."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any, NamedTuple

import torch

from graphopt.tracing.besides import CarriedPlace
from graphopt.tracing.call import Call
from graphopt.tracing.draws.live import digest_of, is_array
from graphopt.tracing.inputs import is_exact
from graphopt.tracing.outside.attributes import attributes_of
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record

_LISTS = (list, deque)


class FoundPlace(NamedTuple):
    """An item of a dictionary in which a step has found a tensor, a number or an array, the length
    of a list, or a number in a variable of a closure. Neither the object whose attribute it is nor
    the tensor is kept alive.

    Attributes:
        holder: gives that object, or the dictionary, the list or the variable.
        value: the number, a weak reference to the tensor, or what tells an array from others.
    """

    path: str
    holder: Callable[[], Any]
    key: Any
    value: Any

    @property
    def place(self) -> OutsidePlace:
        """Where the value is."""
        holder = self.holder()
        if isinstance(holder, _LISTS):
            return OutsidePlace("size", holder)
        if isinstance(holder, CellType):
            return OutsidePlace("cell", holder)
        return OutsidePlace("item", self.table, self.key)

    @property
    def table(self) -> dict[Any, Any]:
        """The dictionary; an empty one where the object is gone."""
        holder = self.holder()
        return holder if isinstance(holder, dict) else attributes_of(holder) or {}

    def is_changed(self) -> bool:
        """Whether another tensor, or another number of its kind, is there now."""
        if isinstance(self.holder(), CellType):
            return self._is_another(self.place.now())
        now = self.table.get(self.key)
        if isinstance(self.holder(), _LISTS):
            return len(self.holder()) != int(self.value)
        if type(self.value) is bytes:
            return is_array(now) and digest_of(now) != self.value
        if isinstance(self.value, weakref.ref):
            return isinstance(now, torch.Tensor) and now is not self.value()
        return self._is_another(now)

    def _is_another(self, now: Any) -> bool:
        return type(now) is type(self.value) and is_exact(now) and now != self.value


def found_places(record: Record, call: Call) -> Iterator[FoundPlace]:
    """Where a step has found tensors, each in one place, and numbers."""
    for read in record.reads.values():
        value = read.value
        if read.place.kind == "size" and type(read.place.holder) in _LISTS:
            yield FoundPlace(read.path, _itself(read.place.holder), None, value)
        if read.place.kind == "cell" and is_exact(value):
            yield FoundPlace(read.path, _itself(read.place.holder), None, value)
        if not read.place.is_item:
            continue
        if is_array(value):
            kept: Any = digest_of(value)
        elif is_exact(value) or _is_in_one_place(record, value):
            kept = weakref.ref(value) if isinstance(value, torch.Tensor) else value
        else:
            continue
        yield FoundPlace(read.path, _holder(record, read.place.holder), read.place.key, kept)
    for name, module in call.named_submodules():
        for key, value in vars(module).items():
            if is_exact(value):
                yield FoundPlace(f"{name}.{key}".strip("."), weakref.ref(module), key, value)


def _is_in_one_place(record: Record, value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor) and not value.requires_grad
    return tensor and len(record.places_of(value)) == 1


def _itself(value: Any) -> Callable[[], Any]:
    return lambda: value


def _holder(record: Record, table: dict[Any, Any]) -> Callable[[], Any]:
    owner = record.owner(table)
    if owner is None:
        return lambda: table
    try:
        return weakref.ref(owner)
    except TypeError:  # of some kinds there are no weak references
        return lambda: owner


def changing(captured: Iterable[Sequence[FoundPlace]]) -> list[CarriedPlace]:
    """Places to be inputs from now on: those of tensors and arrays, and lengths of lists, that are
    others than in an earlier graph, and those of numbers that are others than in two."""
    times: Counter[tuple[Any, ...]] = Counter()
    found: dict[tuple[Any, ...], CarriedPlace] = {}
    for places in captured:
        for each in filter(FoundPlace.is_changed, places):
            place = each.place
            times[place.identity] += 2 if place.kind == "size" or not is_exact(each.value) else 1
            found[place.identity] = CarriedPlace(each.path, place)
    return [place for known, place in found.items() if times[known] > 1]
