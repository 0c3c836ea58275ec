"""Stand-ins: the tensors and numbers that replace a step's inputs during the trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs, Storage
from graphopt.tracing.rollback.substitute import StandIns
from graphopt.tracing.scalars.host_numbers import stand_in_of_number
from graphopt.tracing.tensors.lost_history import accumulates, refuse_backward
from graphopt.tracing.tensors.obtained import ObtainedValues


def stand_ins_of(
    call: Call, inputs: Inputs, flat: Sequence[torch.Tensor], made: ObtainedValues
) -> StandIns:
    """Makes the stand-ins of a call's inputs.

    Args:
        flat: a traced tensor for each placeholder of the graph.
        made: takes note of the numbers.
    """
    supply = iter(flat)
    by_id = _of_modules_and_optimizers(call, inputs, supply)
    gradients: dict[int, torch.Tensor] = {}
    for gradient in inputs.gradients:
        tensor = gradient.owner.tensor
        stand_in = gradients[id(gradient.owner)] = next(supply)
        by_id[id(tensor)].grad = by_id[id(tensor.grad)] = stand_in
    of_arguments = [(call.leaves[position], next(supply)) for position in inputs.argument_gradients]
    numbers: list[Any] = []
    for index, number in enumerate(inputs.hyperparameters):
        tensor, value = next(supply), number.read(call)
        if isinstance(value, torch.Tensor):
            by_id[id(value)] = tensor
            numbers.append(tensor)
        else:
            numbers.append(stand_in_of_number(tensor, value, index, inputs.conditions, made))
            made.add_number(numbers[-1])
    for position in inputs.user:
        by_id[id(call.leaves[position])] = next(supply)
    for leaf, stand_in in of_arguments:
        by_id[id(leaf)].grad = by_id[id(leaf.grad)] = stand_in
    kept = [entry.tensor for entry in inputs.module_tensors]
    kept += [call.leaves[position] for position in inputs.user]
    refuse_backward(((tensor, by_id[id(tensor)]) for tensor in kept), by_id.values())
    return StandIns(by_id, numbers, gradients)


def arguments_of(
    call: Call, inputs: Inputs, traced: StandIns
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments to trace the step with, filled with stand-ins."""
    leaves = [
        traced.by_id.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in call.leaves
    ]
    for number, stand_in in zip(inputs.hyperparameters, traced.numbers, strict=True):
        if isinstance(number, ArgumentNumber):
            leaves[number.position] = stand_in
    for position, field in call.fields():
        field.place.write(leaves[position])
    return call.rebuild(leaves)


def _of_modules_and_optimizers(
    call: Call, inputs: Inputs, supply: Iterator[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Maps ids of parameters, buffers and optimizer state to their stand-ins."""
    by_id: dict[int, torch.Tensor] = {}
    for holder in inputs.placeholders:
        stand_in = next(supply)
        if not isinstance(holder, Storage):
            by_id[id(holder.tensor)] = _without_gradient(stand_in, holder.tensor)
            continue
        for member in holder.members:
            by_id[id(member.tensor)] = _member(stand_in, member.tensor)
    for state in inputs.states:
        by_id[id(state.read(call))] = next(supply)
    for state, owner in inputs.aliases:
        by_id[id(state.read(call))] = by_id[id(owner.tensor)].detach()
    return by_id


def _without_gradient(stand_in: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Clears the gradient of a stand-in, which a user's fake mode may return again with that of an
    earlier trace."""
    if stand_in is not live and stand_in.is_leaf:
        stand_in.grad = None
    return stand_in


def _member(base: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The stand-in of one of several tensors that share the storage `base`."""
    place = real.shape, real.stride(), int(real.storage_offset())
    if place == (base.shape, base.stride(), int(base.storage_offset())):
        view = base.detach()
    else:
        view = torch.as_strided(base, *place).detach()
    if isinstance(real, torch.nn.Parameter):
        view = _compat.as_parameter(view)
    return view.requires_grad_(accumulates(real))
