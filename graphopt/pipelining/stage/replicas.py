"""Sums of the gradients of parameters that several stages hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphopt.pipelining.pipe.sharing import ParameterReplica

if TYPE_CHECKING:
    from graphopt.pipelining.stage.stage import Stage


def reduce_replicated_gradients(*stages: Stage) -> None:
    """Gives every replica of a parameter the sum of the gradients of all replicas.

    To be called on every rank of the pipeline after `schedule.step` and before the optimizer's,
    with all stages that the rank holds. The sum is formed in the order of stages, so that all
    replicas get the same bits.

    >>> from graphopt.pipelining import reduce_replicated_gradients
    >>> reduce_replicated_gradients()  # of a rank without stages
    """
    by_index = {stage.stage_index: stage for stage in stages}
    replicas = {replica for stage in stages for replica in stage.replicas}
    # The same order on all ranks, one replica after the other: no rank waits for one that waits.
    for replica in sorted(replicas, key=lambda replica: replica.holders):
        _reduce(replica, by_index)


def own_replicas(module: nn.Module, stage: int, replicas: Iterable[ParameterReplica]) -> None:
    """Gives a stage its own copies of parameters that an earlier stage holds as well.

    So stages on one rank are as stages on several: each has a gradient of its own, which schedules
    scale once, and the sum of all is formed by `reduce_replicated_gradients`.
    """
    for replica in replicas:
        (owner, _), *_ = replica.holders
        name = dict(replica.holders).get(stage)
        if name is None or stage == owner:
            continue
        shared = module.get_parameter(name)
        copied = nn.Parameter(shared.detach().clone(), shared.requires_grad)
        for alias, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter is shared:
                path, _, leaf = alias.rpartition(".")
                module.get_submodule(path).register_parameter(leaf, copied)


def _reduce(replica: ParameterReplica, stages: dict[int, Stage]) -> None:
    owner, _ = replica.holders[0]
    own = {index: name for index, name in replica.holders if index in stages}
    parameters = {i: stages[i].submod.get_parameter(name) for i, name in own.items()}
    if not next(iter(parameters.values())).requires_grad:
        return
    some = stages[next(iter(own))]
    rank_of = {index: some.stage_index_to_group_rank[index] for index, _ in replica.holders}
    if owner in stages:
        total = _collect(replica, stages[owner], rank_of, parameters)
    else:
        total = _exchange(some, rank_of[owner], parameters)
    for parameter in parameters.values():
        _set_gradient(parameter, total)


def _collect(
    replica: ParameterReplica,
    stage: Stage,
    rank_of: dict[int, int],
    parameters: dict[int, nn.Parameter],
) -> torch.Tensor:
    """On the owner's rank: adds all stages' gradients, and sends the sum to each rank once."""
    pieces = {index: _packed(parameter) for index, parameter in parameters.items()}
    example = next(iter(pieces.values()))
    total = torch.zeros_like(example)
    for index, _ in replica.holders:
        piece = pieces.get(index)
        if piece is None:
            piece = torch.empty_like(example)
            torch.distributed.recv(piece, group=stage.group, group_src=rank_of[index])
        total = total + piece
    for rank in sorted({rank_of[index] for index, _ in replica.holders if index not in pieces}):
        torch.distributed.send(total, group=stage.group, group_dst=rank)
    return total


def _exchange(stage: Stage, owner_rank: int, parameters: dict[int, nn.Parameter]) -> torch.Tensor:
    """On another rank: sends its stages' gradients, in their order, and receives the sum."""
    total = torch.empty(0)
    for _, parameter in sorted(parameters.items()):
        total = _packed(parameter)
        torch.distributed.send(total, group=stage.group, group_dst=owner_rank)
    total = torch.empty_like(total)
    torch.distributed.recv(total, group=stage.group, group_src=owner_rank)
    return total


def _packed(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient as a vector, with one more entry that counts how many stages have one."""
    gradient, data = parameter.grad, parameter.detach()
    if gradient is None:
        return data.new_zeros(data.numel() + 1)
    return torch.cat([gradient.reshape(-1), data.new_ones(1)])


def _set_gradient(parameter: nn.Parameter, total: torch.Tensor) -> None:
    if total[-1] == 0:
        return
    gradient = total[:-1].view_as(parameter)
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.copy_(gradient)
