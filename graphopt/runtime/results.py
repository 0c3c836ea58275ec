"""Writes the results of a captured step: gradients, optimizer state, attributes, return value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphopt import _compat
from graphopt._compat.tensor_classes import put_gradient
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.effects.argument_changes import found_in, make_change
from graphopt.tracing.optimizers.optimizer_state import write
from graphopt.tracing.optimizers.setting_place import SettingPlace
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.results.signature import Computed, Constant, FromCall, Nested, Recipe, View
from graphopt.tracing.tensors.lost_history import leave


class _GraphRun(NamedTuple):
    """A finished run of a graph: inputs, outputs, and nested values that were built from
    recipes."""

    call: Call
    flat: Sequence[Any]
    results: Sequence[Any]
    made: dict[int, Any]


class _StoredValues(NamedTuple):
    """The values that a call stores in attributes and containers, in the signature's order.

    Attributes:
        attributes: values of attributes.
        containers: those among the arguments, each with the items of its change.
        placed: places with their values.
    """

    attributes: list[Any]
    containers: list[tuple[Any, list[Any]]]
    placed: list[tuple[OutsidePlace, Any]]


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
        ran = _GraphRun(call, flat, results, {})
        # Everything is found before anything is put where others may find it.
        outputs = [self._value(recipe, ran) for recipe in self._signature.outputs]
        left = self._left_outside(call, ran)
        self._put_into_tensors(call, ran)
        self._put_outside(left)
        self._put_into_optimizers(call, ran)
        if self._returns_one:
            return outputs[0]
        return _compat.tree_unflatten(outputs, self._signature.output_spec)

    def _left_outside(self, call: Call, ran: _GraphRun) -> _StoredValues:
        signature = self._signature

        def value(recipe: Recipe) -> Any:
            return self._value(recipe, ran)

        return _StoredValues(
            attributes=[value(each.recipe) for each in signature.attributes],
            containers=[
                (
                    found_in(call.given, call.leaves, each.path),
                    [value(item) for _, item in each.items],
                )
                for each in signature.containers
            ],
            placed=[(each.place, value(each.recipe)) for each in signature.placed],
        )

    def _put_into_tensors(self, call: Call, ran: _GraphRun) -> None:
        """Updates the program's tensors: memory, sizes, flags, gradients, and optimizer state."""
        signature, tensors = self._signature, self._tensors
        for placeholder, computed in signature.data.items():
            ran.flat[placeholder].data = ran.results[computed.index]
        for position, flag in signature.flags.items():
            call.leaves[position].requires_grad_(flag)
        for gradient in signature.gradients:
            value = self._value(gradient.recipe, ran)
            if gradient.owner is not None:
                put_gradient(tensors[gradient.owner].live(), value)
            elif gradient.argument is not None:
                call.leaves[gradient.argument].grad = value
        optimizers = call.optimizer_objects()
        for state in signature.states:
            value = self._value(state.recipe, ran)
            write(optimizers[state.optimizer].state, state.stands_at(tensors), state.key, value)
        for number, flag in signature.flags_of_parameters.items():
            tensors[number].live().requires_grad_(flag)

    def _put_outside(self, left: _StoredValues) -> None:
        signature = self._signature
        for attribute, value in zip(signature.attributes, left.attributes, strict=True):
            attribute.attributes[attribute.name] = value
        for placed, (place, value) in zip(signature.placed, left.placed, strict=True):
            is_new = placed.behind and place.key not in place.holder
            place.write(value)
            if is_new:
                _move_behind(place.holder, placed.behind)
        for given, (container, items) in zip(signature.containers, left.containers, strict=True):
            make_change(container, given, items)

    def _put_into_optimizers(self, call: Call, ran: _GraphRun) -> None:
        """Stores settings of parameter groups, and marks optimizers as stepped."""
        signature, optimizers = self._signature, call.optimizer_objects()
        for setting in signature.settings:
            group = SettingPlace.of(optimizers[setting.optimizer], setting.group, setting.key)
            group.write(self._value(setting.recipe, ran))
        for index in signature.stepped:
            _compat.mark_stepped(optimizers[index])

    def _value(self, recipe: Recipe, ran: _GraphRun) -> Any:
        """The value of a recipe, from this call's inputs and the graph's outputs."""
        if isinstance(recipe, Computed):
            value = ran.results[recipe.index]
            if recipe.has_history:
                leave(value)
            return value
        if isinstance(recipe, Constant):
            return recipe.value
        if isinstance(recipe, FromCall):
            return found_in(ran.call.given, ran.call.leaves, recipe.path)
        if isinstance(recipe, Nested):
            return self._made(recipe, ran)
        if isinstance(recipe, View):
            return recipe.made(self._value(recipe.of, ran).detach())
        if recipe.module_tensor is not None:
            return self._tensors[recipe.module_tensor].live()
        assert recipe.placeholder is not None
        return ran.flat[recipe.placeholder]

    def _made(self, recipe: Nested, ran: _GraphRun) -> Any:
        """Builds the container or object of a recipe, once in each call."""
        if id(recipe) not in ran.made:
            leaves = [self._value(leaf, ran) for leaf in recipe.leaves]
            ran.made[id(recipe)] = _compat.tree_unflatten(leaves, recipe.spec)
        return ran.made[id(recipe)]


def _move_behind(table: dict[Any, Any], keys: Sequence[Any]) -> None:
    """Moves dictionary keys behind one that has just been inserted, as in eager code."""
    for key in keys:
        if key in table:
            table[key] = table.pop(key)
