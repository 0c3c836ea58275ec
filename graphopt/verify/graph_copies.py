"""A fast test that one graph is a copy of another, which saves evaluating both."""

from __future__ import annotations

from torch import fx

from graphopt.ir.metadata import known_value
from graphopt.verify.values.remembered_calls import same_arguments


def is_copy_of(graph: fx.Graph, copy: fx.Graph) -> bool:
    """True if both graphs have the same nodes, in one order, with the same arguments and
    metadata."""
    if len(graph.nodes) != len(copy.nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for node, twin in zip(graph.nodes, copy.nodes, strict=True):
        if (node.op, node.target) != (twin.op, twin.target):
            return False
        if known_value(node) is not known_value(twin):
            return False
        given, copied = (node.args, node.kwargs), (twin.args, twin.kwargs)
        if not same_arguments(given, copied, lambda n, m: twins.get(n) is m):
            return False
        twins[node] = twin
    return True
