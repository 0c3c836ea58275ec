"""Places in which steps find tensors and numbers; those whose values vary become inputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any, NamedTuple

import torch

from graphopt.tracing.inputs.entries import is_exact
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs, NamedModules
from graphopt.tracing.outside.places import OutsidePlace, attributes_of
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.tensors.lost_history import accumulates


class FoundPlace(NamedTuple):
    """A dictionary item or closure variable with a tensor or a number. Neither the object whose
    attribute it is nor the tensor is kept alive.

    Attributes:
        holder: gives that object, or the dictionary or the variable.
        value: the number, or a weak reference to the tensor.
    """

    path: str
    holder: Callable[[], Any]
    key: Any
    value: Any

    @property
    def place(self) -> OutsidePlace:
        """The place as an `OutsidePlace`."""
        holder = self.holder()
        if isinstance(holder, CellType):
            return OutsidePlace("cell", holder)
        table = holder if isinstance(holder, dict) else attributes_of(holder)
        return OutsidePlace("item", table or {}, self.key)  # an empty one where it is gone

    @property
    def times(self) -> int:
        """The weight of a changed value in the decision to make the place an input. Where the step
        has added a tensor to a number, there is a tensor from then on."""
        now = self.place.now()
        if not self._is_changed(now):
            return 0
        return 1 if is_exact(now) else 2

    def _is_changed(self, now: Any) -> bool:
        if is_exact(self.value) and isinstance(now, torch.Tensor):
            return not now.requires_grad
        if isinstance(self.value, weakref.ref):
            return isinstance(now, torch.Tensor) and now is not self.value()
        return type(now) is type(self.value) and is_exact(now) and now != self.value


def found_places(record: OutsideRecord, modules: NamedModules) -> Iterator[FoundPlace]:
    """Yields the places in which a step has found tensors (each in one place) and numbers."""
    for read in record.reads.values():
        value, holder = read.value, read.place.holder
        if not read.place.may_carry:
            continue
        if is_exact(value) or _is_in_one_place(record, value):
            kept: Any = weakref.ref(value) if isinstance(value, torch.Tensor) else value
        else:
            continue
        yield FoundPlace(read.path, _holder(record, holder), read.place.key, kept)
    for name, module in modules:
        for key, value in vars(module).items():
            if is_exact(value):
                yield FoundPlace(f"{name}.{key}".strip("."), weakref.ref(module), key, value)


def _is_in_one_place(record: OutsideRecord, value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor) and not accumulates(value)
    return tensor and len(record.places_of(value)) == 1


def _holder(record: OutsideRecord, holder: Any) -> Callable[[], Any]:
    """Gives the object whose attribute table a holder is, or the holder itself."""
    is_part = not isinstance(holder, CellType) and record.owner(holder) is not None
    return record.owners[id(holder)] if is_part else lambda: holder


def changing(captured: Iterable[Sequence[FoundPlace]]) -> ImplicitInputs:
    """The places that become inputs: tensors and arrays that differ from one earlier graph, numbers
    that differ from two."""
    times: Counter[tuple[Any, ...]] = Counter()
    found: dict[tuple[Any, ...], CarriedPlace] = {}
    for places in captured:
        for each in places:
            place, more = each.place, each.times
            if more:
                times[place.identity] += more
                found[place.identity] = CarriedPlace(each.path, place)
    carried = [place for known, place in found.items() if times[known] > 1]
    return ImplicitInputs(carried=carried)
