"""What the program holds of a step's tensors and settings under other names.

    weights = model.weight.detach().numpy()       an array in the memory of a parameter
    group = optimizer.param_groups[0]             a parameter group

While a step is traced, other tensors and groups stand for these. What is read of the real tensors
is what was there before the call; in the place of a group the step finds its stand-in.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.arrays import meets
from graphopt.tracing.call import Call
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.outside.record import Record
from graphopt.tracing.shared_memory import SharedMemory
from graphopt.tracing.substitute import Traced


class Aliases:
    """The real tensors and tables of one trace.

    Args:
        call: before stand-ins are put into its optimizers.
    """

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self._tensors = [entry.tensor for entry in inputs.module_tensors]
        self._groups = _groups(call)

    def watch(
        self, record: Record, call: Call, traced: Traced, memories: list[SharedMemory]
    ) -> None:
        """Let the step find the stand-ins of groups, and let arrays that it reads be refused where
        they lie in the memory of a tensor which it has updated by then.

        Args:
            call: with stand-ins in its optimizers.
            memories: those that are looked at when the step is over.
        """
        graph = _compat.current_tracer().graph

        def reads(array: Any) -> None:
            for tensor in self.under(array):
                memories.append(SharedMemory(traced.by_id[id(tensor)], graph, begun=False))

        record.reads_array = reads
        pairs = list(zip(self._groups, _groups(call), strict=True))
        record.groups = {id(group): stand_in for group, stand_in in pairs}
        record.real_groups = {id(stand_in): group for group, stand_in in pairs}

    def under(self, value: Any) -> list[torch.Tensor]:
        """The tensors of the step in whose memory an array, or another tensor, lies."""
        if not (isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")):
            return []
        if not isinstance(value, torch.Tensor):
            with _compat.without_modes():
                return [tensor for tensor in self._tensors if meets(value, tensor)]
        key = _compat.storage_key(value)
        return [tensor for tensor in self._tensors if _compat.storage_key(tensor) == key]


def _groups(call: Call) -> list[dict[str, Any]]:
    optimizers = call.optimizer_objects()
    return [group for optimizer in optimizers for group in optimizer.param_groups]
