"""Comparison of two traces of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_operator
from graphopt.host import HostCall
from graphopt.ir.bits import same_bits

Said = tuple[fx.Node, Any]
"""A node that computes something, and its arguments in a form that can be compared."""


def compute_the_same(
    a: fx.GraphModule, nodes_a: Sequence[Said], b: fx.GraphModule, nodes_b: Sequence[Said]
) -> bool:
    """True if two graphs, given by `significant`, compute the same.

    Whether autograd takes a gradient over or copies it depends on reference counts; copies that
    change nothing are therefore passed over.
    """
    if len(nodes_a) != len(nodes_b):
        return False
    for (x, arguments_x), (y, arguments_y) in zip(nodes_a, nodes_b, strict=True):
        if x.op == "get_attr" and y.op == "get_attr":
            if not _same_constant(getattr(a, str(x.target)), getattr(b, str(y.target))):
                return False
        elif x.op != y.op or not _same_target(x.target, y.target) or arguments_x != arguments_y:
            return False
    return True


def _same_target(x: Any, y: Any) -> bool:
    if isinstance(x, HostCall) and isinstance(y, HostCall):
        return x.repeats(y)
    return bool(x == y)


class NodeLabels:
    """The labels of a graph's nodes in a comparison: by default their position among significant
    nodes."""

    def __init__(self) -> None:
        self.of: dict[fx.Node, Any] = {}

    def passes_over(self, node: fx.Node, position: int) -> bool:
        """True if a node is not compared; it has a label then.

        Args:
            position: the number of compared nodes before it.
        """
        source = _copied(node)
        if source is not None:
            self.of[node] = self.of[source]
        return source is not None

    def arguments(self, node: fx.Node) -> Any:
        """The arguments of a node in comparable form."""
        return _comparable(node, self.of)


def significant(graph: fx.Graph, labels: NodeLabels | None = None) -> list[Said]:
    """The nodes that compute something, each with its arguments in comparable form."""
    labels = NodeLabels() if labels is None else labels
    nodes: list[Said] = []
    for node in graph.nodes:
        if not labels.passes_over(node, len(nodes)):
            labels.of[node] = len(nodes)
            nodes.append((node, labels.arguments(node)))
    return nodes


def _copied(node: fx.Node) -> fx.Node | None:
    """The node whose value `node` only copies."""
    if is_operator(node.target, "aten::detach", "aten::alias", "aten::new_empty_strided"):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if not is_operator(node.target, "aten::copy_"):
        return None
    destination, source = node.args[:2]
    if not isinstance(destination, fx.Node) or not isinstance(source, fx.Node):
        return None
    fresh = is_operator(destination.target, "aten::new_empty_strided")
    return source if fresh and destination.args[0] is source else None


def _comparable(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
    """Arguments with nodes replaced by positions, and constants by type and text."""

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (list, tuple)):
            return [encode(item) for item in value]
        if isinstance(value, dict):
            return {key: encode(item) for key, item in value.items()}
        return (type(value).__name__, repr(value))

    return encode([node.args, node.kwargs])


def _same_constant(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if _compat.is_fake(x) or _compat.is_fake(y):
            return x.shape == y.shape and x.dtype == y.dtype
        return same_bits(x, y)
    return type(x) is type(y)
