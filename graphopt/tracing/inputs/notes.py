"""Metadata of a captured graph's inputs: other holders, and inputs that nobody reads."""

from __future__ import annotations

from collections.abc import Set
from itertools import chain
from typing import cast

from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import eliminate_dead_code, get_outputs, is_operator, set_outputs
from graphopt.ir.metadata import HELD, HELD_SOMEWHERE, RETURNED, fake_value, input_kind
from graphopt.tracing.inputs.entries import Inputs, InputSpec, Storage
from graphopt.tracing.refusals.failures import definition_of
from graphopt.tracing.results.signature import Computed, Live, Signature, View
from graphopt.tracing.scalars.expressions import leaves_of
from graphopt.tracing.trace import RawTrace


def refuse_shared_updates(raw: RawTrace, updated: list[int]) -> None:
    """Refuses a step that updates an argument which shares storage with another input, whose
    readers would miss the update."""
    kinds = list(raw.inputs.kinds_and_names())
    keys = [_compat.storage_key(value) for value in raw.values]
    for position in updated:
        kind, name = kinds[position]
        if kind == "user_input" and keys.count(keys[position]) > 1:
            raise CaptureError(
                f"it updates argument {name}, which shares storage with another input",
                location=definition_of(raw.step),
                hint="pass a copy (tensor.clone()), or do not update it in place",
            )


def forget_unwritten(graph_module: fx.GraphModule, inputs: Inputs, signature: Signature) -> None:
    """Drops trailing results for replaced storages (`.data = …`) that were not written before."""
    outputs = get_outputs(graph_module.graph)
    left = {i: found.index for i, found in signature.rebound.items() if found is not None}
    if not left:
        return
    first = min(left.values()) - signature.user_results
    carried, of_carried = outputs.carried[:first], outputs.carried
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(inputs.placeholders, placeholders, strict=False)
    owners = {id(holder): node for holder, node in pairs}
    for position, index in left.items():
        value = of_carried[index - signature.user_results]
        signature.rebound[position] = None
        if _copied(value) is not owners[id(inputs.module_tensors[position])]:
            signature.rebound[position] = Computed(signature.user_results + len(carried))
            carried.append(value)
    set_outputs(graph_module.graph, outputs._replace(carried=carried))
    eliminate_dead_code(graph_module.graph)


def _copied(value: fx.Node) -> fx.Node:
    """The node that a chain of clones and detaches copies."""
    while is_operator(value.target, "aten::clone", "aten::detach", "aten::alias"):
        value = cast(fx.Node, value.args[0])
    return value


def note_dead_gradients(
    graph_module: fx.GraphModule, specs: tuple[InputSpec, ...], inputs: Inputs, signature: Signature
) -> None:
    """Marks gradients that nobody reads and that the step replaces, so that they are freed before
    it runs."""
    replaced = {result.owner for result in signature.gradients} - {None}
    unread = {
        node.target
        for node in graph_module.graph.nodes
        if node.op == "placeholder" and not node.users and not node.meta.get(RETURNED)
    }
    gradient_specs = [spec for spec in specs if spec.kind == "gradient"][: len(inputs.gradients)]
    owners = {id(entry): index for index, entry in enumerate(inputs.module_tensors)}
    first = len(inputs.placeholders) + len(inputs.states)
    for number, (spec, gradient) in enumerate(
        zip(gradient_specs, inputs.gradients, strict=True), first
    ):
        index = owners[id(gradient.owner)]
        if number in signature.data:  # somebody may have it
            continue
        if spec.placeholder in unread and index in replaced:
            signature.dead_gradients.append(index)


def note_unread_numbers(graph_module: fx.GraphModule, inputs: Inputs) -> None:
    """Marks numbers on which neither the graph nor a guard depends, such as those set before they
    are read."""
    asked = [each for c in inputs.conditions.all for each in (c.left, c.right)]
    read = set(chain.from_iterable(map(leaves_of, asked)))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    first = inputs.first_number
    numbers = placeholders[first : first + len(inputs.hyperparameters)]
    inputs.unread = frozenset(
        index for index, node in enumerate(numbers) if not node.users and index not in read
    )


def note_returned(graph_module: fx.GraphModule, inputs: Inputs, signature: Signature) -> None:
    """Marks inputs that the step returns, or also receives as an argument: their holders may read
    them at any time."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    given = {_storage(node) for node in placeholders if input_kind(node) == "user_input"}
    for node in placeholders:
        if _storage(node) in given:
            node.meta[RETURNED] = True
    owners: dict[int, fx.Node] = {}
    for node, holder in zip(placeholders, inputs.placeholders, strict=False):
        owners.update((id(member), node) for member in holder.members)
    for recipe in signature.recipes():
        live = recipe.of if isinstance(recipe, View) else recipe
        if not isinstance(live, Live):
            continue
        if live.placeholder is not None:
            placeholders[live.placeholder].meta[RETURNED] = True
        elif live.module_tensor is not None:
            owners[id(inputs.module_tensors[live.module_tensor])].meta[RETURNED] = True


def held_names(raw: RawTrace) -> Set[str]:
    """The names of state that must not have late updates: held elsewhere, or moved to another
    storage by the step."""
    inputs = raw.inputs
    return inputs.held | {inputs.module_tensors[index].fqn for index in raw.signature.rebound}


def note_held(
    graph_module: fx.GraphModule, inputs: Inputs, here: Set[str], anywhere: Set[str]
) -> None:
    """Marks inputs, by name, whose uses by others cannot be seen.

    Args:
        here: held on this rank: they must not be in flight between two steps.
        anywhere: held on some rank, which all ranks know: their gradients are not among those sent
            last, for which others had to wait.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, holder in zip(placeholders, [*inputs.placeholders, *inputs.states], strict=False):
        members = holder.members if isinstance(holder, Storage) else [holder]
        names = {member.fqn for member in members}
        if not here.isdisjoint(names):
            node.meta[HELD] = True
        if not anywhere.isdisjoint(names):
            node.meta[HELD_SOMEWHERE] = True


def _storage(placeholder: fx.Node) -> int:
    return _compat.storage_key(fake_value(placeholder))
