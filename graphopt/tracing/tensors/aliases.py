"""Aliases that the program holds of a step's tensors and settings.

    weights = model.weight.detach().numpy()       an array in the memory of a parameter
    group = optimizer.param_groups[0]             a parameter group

While a step is traced, other tensors and groups stand for these. What is read of the real tensors
is what was there before the call; in the place of a group the step finds its stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.storages import address_of
from graphopt._compat.tensor_classes import alias_of
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.host_work import HostWork


class Aliases:
    """The real tensors and parameter-group tables of one trace.

    Args:
        optimizers: before stand-ins are put into them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], inputs: Inputs) -> None:
        self._tensors = [entry.tensor for entry in inputs.module_tensors]
        self._optimizers, self._groups = optimizers, _groups(optimizers)

    def watch(self, record: OutsideRecord) -> None:
        """Replaces groups that the step reads by their stand-ins, which the optimizers have by now,
        and refuses reads of arrays in a traced tensor's memory."""
        record.reads_array = self._refuse_array
        pairs = list(zip(self._groups, _groups(self._optimizers), strict=True))
        record.groups = {id(group): stand_in for group, stand_in in pairs}
        record.real_groups = {id(stand_in): group for group, stand_in in pairs}

    def _refuse_array(self, array: Any) -> None:
        with _compat.without_modes():
            if any(meets(array, tensor) for tensor in self._tensors):
                raise HostWork.ARRAY.refused("one in the memory of a tensor of the model")


def meets(array: Any, tensor: torch.Tensor) -> bool:
    """True if an array and the storage of a tensor share memory."""
    if tensor.device.type != "cpu" or _compat.is_fake(tensor):
        return False
    if not hasattr(array, "__array_interface__") or not array.size:
        return False
    return any(_meets(array, part) for part in _compat.strided_parts(alias_of(tensor)))


def _meets(array: Any, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    begin = address_of(storage)
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, stride * (size - 1)), high + max(0, stride * (size - 1))
    return bool(low < begin + storage.nbytes() and begin < high + array.itemsize)


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]
