"""The backward of a pipe as graph nodes: one call per stage, in reverse order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import get_output
from graphopt.pipelining.pipe.placement import results, stage_nodes


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: Sequence[int] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Runs the backward of one stage and accumulates into `.grad` of its parameters.

    Args:
        stage_output: the stage's output: a tensor, or a tuple or list of values.
        output_grads: gradients of the outputs, nested alike; None for a loss, or for an output that
            nothing depends on.
        input_values: the values that the stage received.
        outputs_with_grads_idxs: the outputs to start from; all of them when None.

    Returns:
        The gradient of each input value; None for what is no tensor or needs none.

    >>> x = torch.ones(2, requires_grad=True)
    >>> graphopt.pipelining.stage_backward(x * 3, torch.ones(2), [x])
    (tensor([3., 3.]),)
    """
    outputs = _as_list(stage_output)
    grads = _as_list(output_grads) if output_grads is not None else [None] * len(outputs)
    indices = range(len(outputs)) if outputs_with_grads_idxs is None else outputs_with_grads_idxs
    roots: list[torch.Tensor] = []
    root_grads: list[torch.Tensor | None] = []
    for index in indices:
        value, grad = outputs[index], grads[index]
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if grad is None and value.numel() != 1:
            continue
        roots.append(value)
        root_grads.append(grad)
    inputs = [v for v in input_values if isinstance(v, torch.Tensor) and v.requires_grad]
    _backward(roots, root_grads, inputs)
    return tuple(_take_gradient(value) for value in input_values)


def cut(value: Any) -> Any:
    """A received value, detached: a leaf of the stage's own autograd graph."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def add_gradients(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients of one value; None stands for no gradient."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


fx.has_side_effect(stage_backward)


def insert_backward(top: fx.GraphModule, loss_index: int) -> None:
    """Appends the backward of all stages that the loss depends on to the graph of stages.

    Args:
        top: the graph of stages; its output is a tuple of leaves.
        loss_index: the index of the loss among these leaves.
    """
    output = get_output(top.graph)
    leaves: Any = output.args[0]
    calls = stage_nodes(top.graph)
    cuts = {call: _insert_cuts(call) for call in calls}
    gradients: dict[fx.Node, fx.Node | None] = {leaves[loss_index]: None}
    with top.graph.inserting_before(output):
        for call in reversed(calls):
            _insert_stage_backward(top.graph, call, cuts[call], gradients)
    top.graph.lint()
    top.recompile()


def value_before_cut(node: fx.Node) -> fx.Node:
    """The value that is passed to a stage, before it is detached for the stage."""
    if node.target is cut:
        assert isinstance(node.args[0], fx.Node)
        return node.args[0]
    return node


def _insert_cuts(call: fx.Node) -> list[fx.Node]:
    cuts = []
    for value in call.all_input_nodes:
        if value.op == "placeholder":
            continue
        with call.graph.inserting_before(call):
            received = call.graph.call_function(cut, (value,))
        received.meta = dict(value.meta)
        call.replace_input_with(value, received)
        cuts.append(received)
    return cuts


def _insert_stage_backward(
    graph: fx.Graph, call: fx.Node, cuts: list[fx.Node], gradients: dict[fx.Node, fx.Node | None]
) -> None:
    """Adds one stage's backward, and the gradients of its inputs to `gradients`."""
    outputs = list(results(call).values())
    indices = [index for index, value in enumerate(outputs) if value in gradients]
    if not indices:
        return
    grads = [gradients.get(value) for value in outputs]
    backward = graph.call_function(
        stage_backward,
        kwargs={
            "stage_output": outputs,
            "output_grads": grads,
            "input_values": cuts,
            "outputs_with_grads_idxs": indices,
        },
    )
    for index, received in enumerate(cuts):
        grad = graph.call_function(operator.getitem, (backward, index))
        value = value_before_cut(received)
        earlier = gradients.get(value)
        if earlier is not None:
            grad = graph.call_function(add_gradients, (earlier, grad))
        gradients[value] = grad


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _backward(
    roots: list[torch.Tensor], grads: list[torch.Tensor | None], inputs: list[torch.Tensor]
) -> None:
    if not roots:
        return
    for value in inputs:
        if not value.is_leaf:
            value.retain_grad()
    torch.autograd.backward(roots, grads)


def _take_gradient(value: Any) -> torch.Tensor | None:
    """Removes the gradient from a value and returns it."""
    if not isinstance(value, torch.Tensor):
        return None
    with_gradient = value.requires_grad and (value.is_leaf or value.retains_grad)
    gradient = value.grad if with_gradient else None
    if with_gradient:
        value.grad = None
    return gradient
