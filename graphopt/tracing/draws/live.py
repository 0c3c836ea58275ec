"""Arrays of numpy's outside a step, in places that hold other values in each call.

    self.state = self.state + dx          the step leaves another array there
    batch = self.observations[indices]    the program writes to the array between two calls

Each call finds the array before its graph runs, and what the step makes of it is made anew then.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.late import alias_of
from graphopt.tracing.besides import Besides, CarriedPlace
from graphopt.tracing.draws.arguments import Known, Method, kind_of_array
from graphopt.tracing.draws.arrays import HostArray, HostBool
from graphopt.tracing.draws.memory import OfTensors
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.later import Later
from graphopt.tracing.number_expressions import Application, Leaf
from graphopt.tracing.outside.places import OutsidePlace


class ArrayIn:
    """Gives the array that is in a place.

    Args:
        place: outside the step.
    """

    def __init__(self, place: OutsidePlace) -> None:
        self.place = place

    def __call__(self) -> Any:
        return self.place.now()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayIn) and other.place.identity == self.place.identity

    def __hash__(self) -> int:
        return hash(self.place.identity)


def place_of(value: Any) -> OutsidePlace | None:
    """The place outside in which a step finds an array before its graph runs; None of anything
    else."""
    if type(value) is not HostArray or type(value.expression) is not Leaf:
        return None
    function = value.calls.step_of(value).function
    return function.place if isinstance(function, ArrayIn) else None


def is_array(value: Any) -> bool:
    """Whether a value is an array of numbers, of numpy's own class."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def digest_of(array: Any) -> bytes:
    """What tells the values of an array from others."""
    kind = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.blake2b(kind + array.tobytes(), digest_size=16).digest()


def live_arrays(besides: Besides) -> list[CarriedPlace]:
    """The places among those that a graph takes values from in which there are arrays."""
    places: dict[Any, CarriedPlace] = {}
    for each in besides.carried:
        if each.counted or not (besides.plain_arrays or each.place.identity in places):
            places[each.place.identity] = each
    return [each for each in places.values() if each.place.may_carry and is_array(each.place.now())]


def insert_arrays(besides: Besides, calls: HostCalls, inputs: Inputs) -> None:
    """Put what stands for arrays into their places. Undone by `preserved`.

    Raises:
        CaptureError: one lies in the memory of a tensor of the model.
    """
    for path, place, _ in live_arrays(besides):
        found = found_in(place, path, calls, inputs)
        kind = Application(kind_of_array, (found.expression,))
        calls.by_value(kind, kind_of_array(found.plain))
        place.write(calls.given(found))


def found_in(place: OutsidePlace, path: str, calls: HostCalls, inputs: Inputs) -> Known:
    """The array in a place, which each call finds there before its graph runs.

    Raises:
        CaptureError: it lies in the memory of a tensor of the model.
    """
    found = calls.found(ArrayIn(place), (), path)
    lies_in = LiesInModel([entry.tensor for entry in inputs.module_tensors])
    with _compat.without_modes():
        shared = lies_in.searched(found.plain)
    calls.by_value(Application(lies_in, (found.expression,)), False)
    if shared:
        raise calls.refused(
            f"it reads {path}, an array that lies in the memory of a tensor of the model",
            "read the tensor itself, or keep a copy: tensor.numpy().copy()",
        )
    calls.memory.add_outside(found.plain)
    return found


class LiesInModel(OfTensors):
    """Says whether an array and a tensor lie in one memory: that of the tensor, or one that neither
    of them has made."""

    __name__ = "lies_in_model"

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        with _compat.without_modes():
            self._over_others = [each for each in tensors if _is_over_other(each)]

    def __call__(self, array: Any) -> bool:
        if getattr(array, "base", self) is None:  # it owns its memory
            return any(meets(array, tensor) for tensor in self._over_others)
        return hasattr(array, "base") and self.searched(array)

    def searched(self, array: Any) -> bool:
        """The same, whether or not it can be."""
        return any(meets(array, tensor) for tensor in self.tensors)


def _is_over_other(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or _compat.is_fake(tensor):
        return False
    parts = _compat.strided_parts(alias_of(tensor))
    return not all(part.untyped_storage().resizable() for part in parts)


def meets(array: Any, tensor: torch.Tensor) -> bool:
    """Whether an array and the storage of a tensor have memory in common."""
    if tensor.device.type != "cpu" or _compat.is_fake(tensor):
        return False
    if not (array.size and hasattr(array, "base")):
        return False
    return any(_meets(array, part) for part in _compat.strided_parts(alias_of(tensor)))


def _meets(array: Any, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, stride * (size - 1)), high + max(0, stride * (size - 1))
    return bool(low < begin + storage.nbytes() and begin < high + array.itemsize)


def refuse_changed(calls: HostCalls, written: Iterable[Any]) -> None:
    """Refuse a step that writes to an array outside for which it has something else."""
    if calls.memory.meets_outside(written):
        raise calls.refused(
            "it writes to an array outside its arguments that it also reads in another place",
            "write to it outside the step, or let the step read and write it in one place",
        )


def as_later(calls: HostCalls, array: HostArray) -> Later:
    """An array that is known before the graph runs as a value that is made when it has run.

    Raises:
        CaptureError: it is a part of another one.
    """
    if array.is_left or not calls.is_fresh(array):
        raise calls.refused(
            "it keeps or returns an array that it keeps elsewhere as well, or that may lie in the"
            " memory of another one",
            "keep or return a copy: array.copy()",
        )
    array.is_left = True
    tensor = calls.tensor(torch.tensor, (array,))
    return Later(bool, (tensor,)) if type(array) is HostBool else Later(Method("numpy"), (tensor,))
