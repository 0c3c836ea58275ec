"""Models whose parameters are sharded by rows over ranks, and access to whole parameters.

first call            p: Parameter ──▶ p: DTensor, in the model and in its optimizers
full_parameters()     p: DTensor ──▶ p: Parameter while active, by a gather of all ranks
full_state_dict()     the same in a dictionary on the CPU
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError, CollectiveError, GraphOptError
from graphopt.ir.placement import Placement
from graphopt.ir.rows import RowShards
from graphopt.parallel import ZeRO
from graphopt.parallel.sharding import (
    as_dtensor,
    is_dtensor,
    local_part,
    mesh_of,
    window_of,
    without_offset,
)
from graphopt.ranks.meeting import Channel
from graphopt.ranks.spmd import check_same
from graphopt.runtime.agreement.joined_modules import broadcast_from_first
from graphopt.runtime.late.tensors import settle
from graphopt.tracing.call import Call
from graphopt.tracing.ranks.shards import has_whole_states, shard_states
from graphopt.tracing.rollback.reachable import trained_objects

SECONDS = 10.0
"""How long ranks wait for one another where all of them have to gather."""

_SHARD_ALIKE = "all ranks have to build the same model and to give the same parallel="

Slot = tuple[MutableMapping[str, Any], str]


class ShardedModels:
    """The models that one training step shards.

    Args:
        topic: the same text on all ranks, different for different step functions.
    """

    def __init__(self, topic: str, parallel: ZeRO) -> None:
        self._topic, self._parallel = topic, parallel
        self._roots: dict[int, tuple[str, weakref.ref[nn.Module]]] = {}
        self._whole = False

    @property
    def has_parameters(self) -> bool:
        """True if parameters are sharded, not only optimizer state."""
        return self._parallel.stage == 3

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which the models are sharded."""
        return self._parallel.axes[-1]

    def has_new(self, call: Call) -> bool:
        """True if a call has a model, or state of an optimizer, that is not sharded yet."""
        known = all(id(root) in self._roots for _, root in call.named_roots())
        return not known or has_whole_states(call, self._parallel)

    def shard(self, call: Call, *, together: bool = False) -> bool:
        """Shards the whole parameters of a call, and returns True if there were any. All ranks call
        it in the first call with a model, and where one has found a model that the step reaches
        besides its arguments.

        Args:
            together: all ranks are here, with a new model or without one.

        Raises:
            CollectiveError: the group has one rank.
            SpmdMismatchError: the ranks shard otherwise.
            CaptureError: parameters have gradients when they are to be sharded.
        """
        if self._whole:
            raise GraphOptError(
                "the step is called while full_parameters() is active\n"
                "  hint:  leave the `with` first: the step works on rows"
            )
        new = [(name, root) for name, root in call.named_roots() if id(root) not in self._roots]
        changed = False
        if new or together:
            self._agree(call)
            changed = self._parallel.stage == 3 and self._shard_parameters(call)
            for name, root in new:
                self._roots[id(root)] = name, weakref.ref(root)
        return shard_states(call, self._parallel) > 0 or changed

    def _agree(self, call: Call) -> None:
        parallel = self._parallel
        if self.group.size() == 1:
            raise CollectiveError(
                "ZeRO shards over the ranks of a group, and this one has a single rank",
                hint="leave parallel= out where there is one rank",
            )
        mine = {
            "stage": [f"ZeRO(stage={parallel.stage}, keep_mb={parallel.keep_mb})"],
            "groups": [str(list(row)) for row in parallel.mesh],
            "parameters": [
                f"{name} {parameter.dtype} {list(parameter.shape)}"
                for _, root in call.named_roots()
                for name, parameter in root.named_parameters()
                if parameter.requires_grad
            ],
        }
        channel = Channel(parallel.everyone, f"{self._topic} sharded", parallel.timeout)
        everyone = channel.exchange(mine)
        for key in mine:
            check_same(f"{key} to shard", [theirs[key] for theirs in everyone], _SHARD_ALIKE)

    def _shard_parameters(self, call: Call) -> bool:
        chosen = self._chosen(call)
        for name, parameter in chosen:
            if parameter.grad is not None:
                raise CaptureError(
                    f"{name} has a gradient when it is to be sharded",
                    hint="call optimizer.zero_grad() before the first call of the step",
                )
        if self._parallel.broadcast:
            tensors = [parameter for _, parameter in chosen]
            broadcast_from_first(tensors, self._parallel.everyone)
        new = {id(parameter): self._sharded(parameter) for _, parameter in chosen}
        for _, root in call.named_roots():
            for table, key in _slots_of(root):
                table[key] = new.get(id(table[key]), table[key])
        for optimizer in _optimizers_of(call):
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(each), each) for each in group["params"]]
            items = list(optimizer.state.items())
            optimizer.state.clear()
            optimizer.state.update((new.get(id(of), of), entries) for of, entries in items)
        for _, parameter in chosen:
            parameter.data = parameter.data.new_empty(0)
        for _, root in call.named_roots():
            for module in root.modules():
                if any(map(is_dtensor, module.parameters(recurse=False))):
                    module.register_load_state_dict_pre_hook(_cut_loaded)
                    module.register_state_dict_post_hook(_make_copyable)
        return bool(new)

    def _chosen(self, call: Call) -> list[tuple[str, nn.Parameter]]:
        """The parameters to shard, each once, with names."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, root in call.named_roots():
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), (f"{prefix}.{name}".strip("."), parameter))
        tensors: list[torch.Tensor] = [parameter for _, parameter in found.values()]
        tensors += [buffer for _, root in call.named_roots() for buffer in root.buffers()]
        settle(tensors)
        places = Counter(_compat.storage_key(tensor) for tensor in tensors)
        return [
            (name, parameter)
            for name, parameter in found.values()
            if not is_dtensor(parameter) and places[_compat.storage_key(parameter)] == 1
            if self._parallel.placement_of_parameter(parameter) != Placement.FULL
        ]

    def _sharded(self, parameter: nn.Parameter) -> Any:
        group = self.group
        shards = RowShards(tuple(parameter.shape), group.size())
        part = local_part(parameter, shards, group.rank())
        wanted = partial(nn.Parameter, requires_grad=parameter.requires_grad)
        mesh = mesh_of(self._parallel.axes, parameter.device)
        new: Any = as_dtensor(part, shards, mesh, wanted)
        vars(new).update({k: v for k, v in vars(parameter).items() if k not in vars(new)})
        return new

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """While active, parameters are whole; writes to them are kept.

        Raises:
            SpmdMismatchError: not all ranks have come.
        """
        if self._parallel.stage != 3 or self._whole:
            yield
            return
        self._meet("full_parameters()")
        slots = [slot for _, root in self._live() for slot in _slots_of(root)]
        sharded = {id(table[key]): table[key] for table, key in slots if is_dtensor(table[key])}
        wholes = {
            number: nn.Parameter(each.full_tensor().detach(), requires_grad=each.requires_grad)
            for number, each in sharded.items()
        }
        places = [(table, key, id(table[key])) for table, key in slots if id(table[key]) in wholes]
        for table, key, number in places:
            table[key] = wholes[number]
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for table, key, number in places:
                table[key] = sharded[number]
            rank, ranks = self.group.rank(), self.group.size()
            with torch.no_grad():
                for number, each in sharded.items():
                    shards = RowShards(tuple(each.shape), ranks)
                    window_of(each, shards, rank).copy_(local_part(wholes[number], shards, rank))

    def full_state_dict(self) -> dict[str, Any]:
        """A copy of the models' whole state on the CPU, on all ranks; of several models, with
        argument names as prefixes.

        Raises:
            SpmdMismatchError: not all ranks have come.
        """
        self._meet("full_state_dict()")
        found: dict[str, Any] = {}
        for name, root in self._live():
            for key, value in root.state_dict().items():
                found[f"{name}.{key}".strip(".")] = _on_cpu(value)
        return found

    def _meet(self, what: str) -> None:
        channel = Channel(self._parallel.everyone, f"{self._topic} {what}", SECONDS)
        channel.exchange({"what": what})

    def _live(self) -> Iterator[tuple[str, nn.Module]]:
        for name, reference in self._roots.values():
            root = reference()
            if root is not None:
                yield name, root


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_dtensor(value):
        return value.full_tensor().detach().cpu()  # type: ignore[attr-defined]
    return value.detach().to("cpu", copy=True)  # not what the next step updates


def _optimizers_of(call: Call) -> list[Optimizer]:
    """The optimizers of a call, and those that its step can reach."""
    reached = trained_objects(call.fn, call.leaves)
    found = [*call.optimizer_objects(), *(each for each in reached if isinstance(each, Optimizer))]
    return list({id(each): each for each in found}.values())


def _slots_of(root: nn.Module) -> Iterator[Slot]:
    """The places of parameters in a module and those below it."""
    for module in root.modules():
        table = _compat.own_parameters(module)
        yield from ((table, key) for key in list(table) if table[key] is not None)


def _cut_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before a state is loaded: cuts whole tensors to rows where parameters are sharded."""
    for key, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + key)
        if not is_dtensor(parameter) or not isinstance(value, torch.Tensor) or is_dtensor(value):
            continue
        if value.shape != parameter.shape:
            continue  # which torch says
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        shards = RowShards(tuple(value.shape), mesh.size(mesh.ndim - 1))
        rank = mesh.get_coordinate()[-1]
        part = local_part(value.to(parameter.device, parameter.dtype), shards, rank)
        state_dict[prefix + key] = as_dtensor(part, shards, mesh)


def _make_copyable(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """After a state dictionary is made: lets `copy.deepcopy` and `torch.save` take its parameters,
    which share memory with those of the model as elsewhere."""
    for key in _compat.own_parameters(module):
        value = state_dict.get(prefix + key)
        if is_dtensor(value) and value.storage_offset():  # type: ignore[union-attr]
            state_dict[prefix + key] = without_offset(value)
