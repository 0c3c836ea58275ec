"""Pairs of gradient and parameter in a graph's optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import input_kind, known_value, phase_of
from graphopt.optim.elements import Elements


def gradients_of(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Returns the gradient that the optimizer uses for each parameter, after averaging and
    clipping.

    Args:
        gm: a graph in the captured dialect, with fused, foreach or plain optimizers.

    Returns:
        Placeholder of the parameter -> node that holds its gradient, in the order of the graph's
        updates. A parameter whose update does not tell is left out: its gradient was combined with
        others, or has another shape.

    >>> gradients = graphopt.optim.gradients_of(gm)
    >>> {parameter.meta["fqn"]: gradient for parameter, gradient in gradients.items()}
    {'weight': wait_tensor_1, 'bias': wait_tensor}
    """
    elements = Elements(gm.graph)
    containers = [c for call in elements.lists.values() for c in call.containers()]
    items = {elements.number[item]: item for container in containers for item in container.users}
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        parameter = _updated_parameter(node)
        if parameter is None:
            continue
        given = set(_given(elements, items, elements.number[node], parameter))
        if len(given) == 1:
            found[parameter] = given.pop()
    return found


def _updated_parameter(node: fx.Node) -> fx.Node | None:
    if not is_operator(node.target, "aten::copy_"):
        return None
    state = node.args[0]
    known = isinstance(state, fx.Node) and input_kind(state) == "parameter"
    return state if known else None  # type: ignore[return-value]


def _given(
    elements: Elements, items: dict[int, fx.Node], update: int, parameter: fx.Node
) -> Iterator[fx.Node]:
    """Yields the external inputs of one update that have the shape of the parameter."""
    seen: set[int] = set()
    pending = list(elements.inputs[update])
    while pending:
        element = pending.pop()
        if element in seen:
            continue
        seen.add(element)
        node = elements.nodes[element]
        if phase_of(node) == "optimizer":
            pending += elements.inputs[element]
            continue
        node = items.get(element, node)
        if _is_gradient(node, parameter):
            yield node


def _is_gradient(node: fx.Node, parameter: fx.Node) -> bool:
    if node.op == "get_attr" or (node.op == "placeholder" and input_kind(node) != "gradient"):
        return False
    value, wanted = known_value(node), known_value(parameter)
    if not isinstance(value, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return False
    return value.shape == wanted.shape
