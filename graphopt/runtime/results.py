"""What a call of a captured step leaves behind: gradients, optimizer state, attributes, results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.late import set_gradient
from graphopt.tracing.call import Call
from graphopt.tracing.capture import CapturedStep
from graphopt.tracing.optimizer_state import write
from graphopt.tracing.signature import Computed, Constant, Recipe, View


def put_results(
    captured: CapturedStep, call: Call, flat: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Put what a graph has computed where the step would have put it.

    Args:
        call: the call of the step.
        flat: the inputs of the graph.
        results: what it returned besides state that it has updated itself.

    Returns:
        What the step returns.
    """
    signature, tensors = captured.signature, captured.live.module_tensors
    optimizers = call.optimizer_objects()

    def value_of(recipe: Recipe) -> Any:
        return _value(captured, recipe, flat, results)

    for gradient in signature.gradients:
        value = value_of(gradient.recipe)
        if gradient.owner is not None:
            set_gradient(tensors[gradient.owner].tensor, value)
        elif gradient.argument is not None:
            call.leaves[gradient.argument].grad = value
    for state in signature.states:
        place = optimizers[state.optimizer].state
        write(place, state.stands_at(tensors), state.key, value_of(state.recipe))
    for attribute in signature.attributes:
        attribute.attributes[attribute.name] = value_of(attribute.recipe)
    for setting in signature.settings:
        group = optimizers[setting.optimizer].param_groups[setting.group]
        group[setting.key] = value_of(setting.recipe)
    for index in signature.stepped:
        _compat.mark_stepped(optimizers[index])
    outputs = [value_of(recipe) for recipe in signature.outputs]
    return _compat.tree_unflatten(outputs, signature.output_spec)


def _value(
    captured: CapturedStep, recipe: Recipe, flat: Sequence[Any], results: Sequence[Any]
) -> Any:
    """What a recipe stands for."""
    if isinstance(recipe, Computed):
        return results[recipe.index]
    if isinstance(recipe, Constant):
        return recipe.value
    if isinstance(recipe, View):
        base = _value(captured, recipe.of, flat, results).detach()
        offset = base.storage_offset() + recipe.offset
        return torch.as_strided(base, recipe.size, recipe.stride, offset)
    if recipe.module_tensor is not None:
        return captured.live.module_tensors[recipe.module_tensor].live()
    assert recipe.placeholder is not None
    return flat[recipe.placeholder]
