"""Sharded inputs of a step, and the whole fake tensors that replace them in a trace.

A step is traced as that of one device, on tensors of their whole shapes. In the optimizer, and in
the model, what is sharded is a DTensor whose local tensor are the rows that this rank owns; the
graph takes the window in which these lie (`graphopt.parallel.sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt.ir.placement import Placement
from graphopt.ir.rows import RowShards
from graphopt.parallel.kinds import OverRanks
from graphopt.parallel.sharding import as_dtensor, is_dtensor, local_part, mesh_of, window_of
from graphopt.tracing.inputs.entries import ModuleTensor

if TYPE_CHECKING:
    from graphopt.parallel import Parallel
    from graphopt.tracing.call import Call
    from graphopt.tracing.inputs.entries import Inputs, InputSpec


def placements(
    inputs: Inputs, values: Sequence[torch.Tensor], parallel: Parallel
) -> dict[int, Placement]:
    """How the ranks hold inputs of a step, by position, where they do not hold them whole.

    Args:
        values: of the inputs.
    """
    if not isinstance(parallel, OverRanks):
        return {}
    found = {}
    for index, holder in enumerate(inputs.placeholders):
        if isinstance(holder, ModuleTensor) and holder.kind == "parameter" and not holder.bare:
            found[index] = parallel.placement_of_parameter(holder.tensor)
    for index, state in enumerate(inputs.states, len(inputs.placeholders)):
        if isinstance(state.parameter, ModuleTensor):
            found[index] = parallel.placement_of_state(values[index], state.parameter.tensor)
    return {index: placement for index, placement in found.items() if placement != Placement.FULL}


def whole_fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the whole shape, for a tensor of which this rank has rows."""
    with mode:
        whole = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(whole, requires_grad=tensor.requires_grad)
        return whole.requires_grad_(tensor.requires_grad)


def shard_states(call: Call, parallel: OverRanks) -> int:
    """Reduces whole optimizer state of a call to this rank's rows. Returns how many entries have
    changed."""
    whole = list(_whole_states(call, parallel))
    for entries, key, rows in whole:
        entries[key] = rows
    return len(whole)


def has_whole_states(call: Call, parallel: OverRanks) -> bool:
    """True if a call's optimizers hold state whole that should be sharded."""
    return any(True for _ in _whole_states(call, parallel))


def _whole_states(call: Call, parallel: OverRanks) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Yields optimizer entries to shard that are whole: table, key, and this rank's rows."""
    for optimizer in call.optimizer_objects():
        for parameter, entries in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(entries, dict):
                continue
            for key, value in list(entries.items()):
                rows = _sharded(value, parameter, parallel)
                if rows is not value:
                    yield entries, key, rows


def shard_made(entries: list[Any], parallel: Parallel) -> list[Any]:
    """Shards created optimizer state that is not in its optimizers yet."""
    if not isinstance(parallel, OverRanks):
        return entries
    return [(*place, owner, key, _sharded(v, owner, parallel)) for *place, owner, key, v in entries]


def _sharded(value: Any, parameter: Any, parallel: OverRanks) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, torch.Tensor):
        return value
    if is_dtensor(value) or parallel.placement_of_state(value, parameter) == Placement.FULL:
        return value
    *_, group = parallel.axes
    shards = RowShards(tuple(value.shape), group.size())
    part = local_part(value, shards, group.rank())
    return as_dtensor(part, shards, mesh_of(parallel.axes, value.device))


class ShardWindows:
    """The windows that a graph takes for sharded inputs, by position.

    Args:
        inputs: of the graph, in order.
        parallel: has the ranks that hold what is sharded.
    """

    def __init__(self, inputs: Sequence[InputSpec], parallel: Parallel) -> None:
        sharded = [i for i, spec in enumerate(inputs) if spec.placement.rows is not None]
        self._sharded = sharded
        self._known: dict[int, tuple[Any, int, torch.Tensor]] = {}
        if sharded:
            assert isinstance(parallel, OverRanks)
            *_, group = parallel.axes
            self._ranks, self._rank = group.size(), group.rank()

    def put(self, values: list[Any]) -> list[Any]:
        """Replaces DTensors among the inputs by this rank's windows."""
        for index in self._sharded:
            values[index] = self._window(index, values[index])
        return values

    def _window(self, index: int, value: Any) -> torch.Tensor:
        known, place, window = self._known.get(index, (None, 0, None))
        now = _compat.local_of(value).data_ptr()
        if known is value and place == now and window is not None:
            return window
        window = window_of(value, RowShards(tuple(value.shape), self._ranks), self._rank)
        self._known[index] = value, _compat.local_of(value).data_ptr(), window
        return window
