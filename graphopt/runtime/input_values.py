"""The current inputs of a captured graph in a call, in order: tensors and numbers."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.tensor_classes import put_gradient
from graphopt.guards.guards import Guards
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import Storage, as_tensor
from graphopt.tracing.ranks.shards import ShardWindows


class InputValues:
    """Collects the inputs of one captured graph."""

    def __init__(self, captured: CapturedStep, guards: Guards) -> None:
        self._inputs = inputs = captured.live
        self._guards = guards
        holders = inputs.placeholders
        self._replaceable = [
            (index, holder)
            for index, holder in enumerate(holders)
            if isinstance(holder, Storage) or holder.rebindable
        ]
        self._tensors: list[Any] = [
            None if isinstance(holder, Storage) else holder.tensor for holder in holders
        ]
        signature, tensors = captured.signature, inputs.module_tensors
        fails = bool(inputs.answers)  # and must leave all gradients then
        dead = set() if fails else {id(tensors[index]) for index in signature.dead_gradients}
        self._dropped = [] if fails else [tensors[index] for index in signature.dropped_gradients]
        self._gradients = [(g.owner, id(g.owner) in dead) for g in inputs.gradients]
        self._windows = ShardWindows(captured.inputs, captured.parallel)
        self._numbers: dict[int, tuple[Any, torch.Tensor]] = {}

    def of_state(self) -> list[Any]:
        """The inputs that are module tensors and optimizer state."""
        values = [*self._tensors, *self._guards.states]
        for index, holder in self._replaceable:
            values[index] = holder.live()
        return self._windows.put(values)

    def of_call(self, call: Call) -> list[Any]:
        """The inputs that are gradients, numbers and arguments. Drops gradients that the step
        drops unread."""
        values: list[Any] = []
        for owner in self._dropped:
            put_gradient(owner.live(), None)
        for owner, dead in self._gradients:
            parameter = owner.live()
            values.append(None if dead else parameter.grad)
            if dead:
                put_gradient(parameter, None)
        inputs = self._inputs
        values.extend(call.leaves[position].grad for position in inputs.argument_gradients)
        numbers = self._guards.numbers_of(call)
        values.extend(map(self._as_tensor, count(), numbers))
        values.extend(call.leaves[position] for position in inputs.user)
        return values

    def updated_storages(self, values: list[Any]) -> frozenset[int]:
        """The storages among all inputs that the step may update."""
        inputs = self._inputs
        others = len(inputs.hyperparameters) + len(inputs.user)
        state = values[: len(values) - others]
        return frozenset(_compat.storage_key(v) for v in state if isinstance(v, torch.Tensor))

    def _as_tensor(self, index: int, value: Any) -> torch.Tensor:
        """A hyperparameter as a tensor, reusing the last call's if it is unchanged."""
        known, tensor = self._numbers.get(index, (None, None))
        if tensor is None or known is not value or _compat.may_be_written(tensor):
            tensor = as_tensor(value)
            self._numbers[index] = value, tensor
        return tensor
