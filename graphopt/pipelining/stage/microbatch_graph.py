"""The parts of a captured microbatch, as the proof expects each graph of the stage to compute them.

Made of the captured graph alone, without its division: another microbatch than the last does not
average its gradients, and the first one has none to add to.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from graphopt.errors import VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    get_outputs,
    is_operator,
    is_random,
    same_kind,
)
from graphopt.ir.metadata import fake_value, phase_of
from graphopt.iter_graph.graph import copy_graph
from graphopt.pipelining.stage.accumulating import GradientUpdate
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.results.signature import Computed, Live, Recipe, View

aten = torch.ops.aten

Named = list[tuple[str, View | None]]
"""Results in words; of each, which view of what the graph gives it is."""


def mutable_inputs(captured: CapturedStep) -> dict[int, str]:
    """The placeholders that a microbatch updates: their targets by position."""
    graph = captured.graph_module.graph
    updated = {update.args[0] for update in get_outputs(graph).updates}
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    return {position: str(node.target) for position, node in placeholders if node in updated}


def gradient_positions(captured: CapturedStep) -> range:
    """The positions of the placeholders that are gradients of parameters."""
    start = len(captured.live.placeholders) + len(captured.live.states)
    return range(start, start + len(captured.live.gradients))


def left_by_microbatch(
    captured: CapturedStep, wanted: GradientUpdate | str
) -> tuple[fx.Graph, Named]:
    """A separate graph of the results and updates that a microbatch leaves.

    Args:
        captured: the last microbatch of a step.
        wanted: what is done with gradients of parameters; or up to where the microbatch goes:
            "forward", "evaluation", "input_backward".

    Returns:
        The graph, which returns ``(results, updates, carried)``, and what its results are: what is
        sent, and gradients of arguments. Carried are gradients that there were none of before.

    Raises:
        VerificationError: the gradient of a parameter is not added to the one before.
    """
    graph, _ = copy_graph(captured.graph_module.graph, into=fx.Graph)
    placeholders = graph.find_nodes(op="placeholder")
    outputs = get_outputs(graph)
    updated = {cast(fx.Node, update.args[0]): update for update in outputs.updates}
    gradients = {placeholders[p] for p in gradient_positions(captured)} & updated.keys()
    sent = [("a result", recipe) for recipe in captured.signature.outputs]
    if wanted not in ("forward", "evaluation"):
        of_arguments = sorted(captured.signature.gradients, key=lambda found: found.argument or 0)
        sent += [(f"the gradient of argument {g.argument}", g.recipe) for g in of_arguments]
    found = [(name, *_given(recipe, graph, updated)) for name, recipe in sent]
    updates = [update for state, update in updated.items() if state not in gradients]
    carried: list[fx.Node] = []
    if wanted is GradientUpdate.AVERAGE:
        updates += [updated[gradient] for gradient in gradients]
    elif isinstance(wanted, GradientUpdate):
        sums = [_sum(gradient) for gradient in placeholders if gradient in gradients]
        if wanted is GradientUpdate.ADD:
            updates += [_update(graph, gradient, last) for gradient, _, last in sums]
        else:
            carried = [_alone(graph, *each) for each in sums]
    graph.erase_node(graph.output_node())
    graph.output(([node for _, node, _ in found], updates, carried))
    _drop_unread(graph)
    return graph, [(name, view) for name, _, view in found]


def _given(
    recipe: Recipe, graph: fx.Graph, updated: dict[fx.Node, fx.Node]
) -> tuple[fx.Node, View | None]:
    """The node that gives a result, and the view of it that the result is."""
    if isinstance(recipe, Computed):
        outputs = get_outputs(graph)
        return [*outputs.results, *outputs.carried][recipe.index], None
    assert isinstance(recipe, (Live, View)), "a stage sends tensors"
    view = recipe if isinstance(recipe, View) else None
    position = (recipe.of if isinstance(recipe, View) else recipe).placeholder
    assert position is not None, "what a stage sends is a tensor of its own"
    placeholder = graph.find_nodes(op="placeholder")[position]
    return updated.get(placeholder, placeholder), view


def _sum(gradient: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """A gradient, its sum with the one before, and the value that hooks make of the sum. The
    average is no part of it."""
    readers = list(filter(_in_backward, gradient.users))
    if len(readers) != 1 or not is_operator(readers[0].target, "aten::add"):
        raise VerificationError(f"%{gradient.name} is not added up as autograd does it")
    found, pending = {readers[0]}, [readers[0]]
    while pending:
        later = set(filter(_in_backward, pending.pop().users)) - found
        found |= later
        pending += later
    left = [node for node in found if any(user not in found for user in node.users)]
    if len(left) != 1:
        raise VerificationError(f"the backward leaves several values of %{gradient.name}")
    return gradient, readers[0], left[0]


def _in_backward(node: fx.Node) -> bool:
    return phase_of(node) == "backward" and not is_operator(node.target, "aten::copy_")


def _update(graph: fx.Graph, gradient: fx.Node, value: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        arguments = (gradient, value)
        return call_function_with_meta(graph, aten.copy_.default, arguments, like=value)


def _alone(graph: fx.Graph, gradient: fx.Node, added: fx.Node, last: fx.Node) -> fx.Node:
    """The backward's gradient without one to add to, laid out as the sum is."""
    new = next(node for node in added.all_input_nodes if node is not gradient)
    held = fake_value(gradient)
    with graph.inserting_before(added):
        if same_kind(new, gradient):
            own = call_function_with_meta(graph, aten.clone.default, (new,), like=added)
        else:
            layout = (new, list(held.shape), list(held.stride()))
            empty = call_function_with_meta(graph, aten.new_empty_strided.default, layout)
            own = call_function_with_meta(graph, aten.copy.default, (empty, new), like=added)
    for user in list(added.users):
        user.replace_input_with(added, own)
    return own if last is added else last


def _drop_unread(graph: fx.Graph) -> None:
    """Removes nodes that nobody reads, except those that draw random numbers."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)
