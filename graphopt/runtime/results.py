"""Writes the results of a captured step: gradients, optimizer state, attributes, return value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphopt import _compat
from graphopt._compat.tensor_classes import put_gradient
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.effects.argument_changes import found_in, make_change
from graphopt.tracing.inputs.entries import ModuleTensor
from graphopt.tracing.optimizers.optimizer_state import write
from graphopt.tracing.optimizers.setting_place import SettingPlace
from graphopt.tracing.results.signature import (
    Computed,
    Constant,
    FromCall,
    FromPlace,
    Nested,
    PlacedResult,
    Recipe,
    View,
)
from graphopt.tracing.tensors.lost_history import leave


class StepResults:
    """Stores the results of a captured graph where the step would have stored them."""

    def __init__(self, captured: CapturedStep) -> None:
        self._signature, self._tensors = captured.signature, captured.live.module_tensors
        self._returns_one = captured.signature.output_spec == _compat.ONE_VALUE

    def put(self, call: Call, flat: Sequence[Any], results: Sequence[Any]) -> Any:
        """Stores the gradients, states and attributes of a call, and builds its return value.

        Args:
            call: the call of the step.
            flat: the inputs of the graph.
            results: what it returned besides state that it has updated itself.

        Returns:
            What the step returns.
        """
        signature, ran = self._signature, _GraphRun(call, flat, results, self._tensors)
        # Everything is found before anything is put where others may find it.
        outputs = [ran.value(recipe) for recipe in signature.outputs]
        attributes = [(each, ran.value(each.recipe)) for each in signature.attributes]
        containers = [
            (
                found_in(call.given, call.leaves, change.path),
                change,
                [ran.value(item) for _, item in change.items],
            )
            for change in signature.containers
        ]
        placed = [(each, ran.value(each.recipe)) for each in signature.placed]
        self._put_into_tensors(ran)
        for attribute, value in attributes:
            attribute.attributes[attribute.name] = value
        for each, value in placed:
            _put_outside(each, value)
        for container, change, items in containers:
            make_change(container, change, items)
        self._put_into_optimizers(ran)
        if self._returns_one:
            return outputs[0]
        return _compat.tree_unflatten(outputs, signature.output_spec)

    def _put_into_tensors(self, ran: _GraphRun) -> None:
        """Updates the program's tensors: memory, sizes, flags, gradients, and optimizer state."""
        signature, tensors, call = self._signature, self._tensors, ran.call
        for placeholder, computed in signature.data.items():
            ran.flat[placeholder].data = ran.results[computed.index]
        for position, flag in signature.flags.items():
            call.leaves[position].requires_grad_(flag)
        for gradient in signature.gradients:
            value = ran.value(gradient.recipe)
            if gradient.owner is not None:
                put_gradient(tensors[gradient.owner].live(), value)
            elif gradient.argument is not None:
                call.leaves[gradient.argument].grad = value
        optimizers = call.optimizer_objects()
        for state in signature.states:
            value = ran.value(state.recipe)
            write(optimizers[state.optimizer].state, state.stands_at(tensors), state.key, value)
        for number, flag in signature.flags_of_parameters.items():
            tensors[number].live().requires_grad_(flag)

    def _put_into_optimizers(self, ran: _GraphRun) -> None:
        """Stores settings of parameter groups, and marks optimizers as stepped."""
        signature, optimizers = self._signature, ran.call.optimizer_objects()
        for setting in signature.settings:
            group = SettingPlace.of(optimizers[setting.optimizer], setting.group, setting.key)
            group.write(ran.value(setting.recipe))
        for index in signature.stepped:
            _compat.mark_stepped(optimizers[index])


class _GraphRun:
    """A finished run of a graph, with the values that recipes make of its inputs and results."""

    def __init__(
        self,
        call: Call,
        flat: Sequence[Any],
        results: Sequence[Any],
        tensors: Sequence[ModuleTensor],
    ) -> None:
        self.call, self.flat, self.results, self._tensors = call, flat, results, tensors
        self._made: dict[int, Any] = {}

    def value(self, recipe: Recipe) -> Any:
        """The value of a recipe."""
        if isinstance(recipe, Computed):
            value = self.results[recipe.index]
            if recipe.has_history:
                leave(value)
            return value
        if isinstance(recipe, Constant):
            return recipe.value
        if isinstance(recipe, FromCall):
            return found_in(self.call.given, self.call.leaves, recipe.path)
        if isinstance(recipe, FromPlace):
            return recipe.now()
        if isinstance(recipe, Nested):  # which is made once in each call
            if id(recipe) not in self._made:
                leaves = [self.value(leaf) for leaf in recipe.leaves]
                self._made[id(recipe)] = _compat.tree_unflatten(leaves, recipe.spec)
            return self._made[id(recipe)]
        if isinstance(recipe, View):
            return recipe.made(self.value(recipe.of).detach())
        if recipe.module_tensor is not None:
            return self._tensors[recipe.module_tensor].live()
        assert recipe.placeholder is not None
        return self.flat[recipe.placeholder]


def _put_outside(placed: PlacedResult, value: Any) -> None:
    """Stores a value in its place; behind a key that is new come the keys as in eager code."""
    place = placed.place
    is_new = placed.behind and place.key not in place.holder
    place.write(value)
    if is_new:
        for key in placed.behind:
            if key in place.holder:
                place.holder[key] = place.holder.pop(key)
