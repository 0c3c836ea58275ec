"""Is a graph a copy of another, node by node? Then nothing has to be evaluated."""

from __future__ import annotations

from torch import fx


def is_copy_of(graph: fx.Graph, copy: fx.Graph) -> bool:
    """Whether both have the same nodes, in one order, with the same arguments and metadata."""
    if len(graph.nodes) != len(copy.nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for node, twin in zip(graph.nodes, copy.nodes, strict=True):
        if (node.op, node.target) != (twin.op, twin.target):
            return False
        if node.meta.get("val") is not twin.meta.get("val"):
            return False
        given = fx.node.map_arg((node.args, node.kwargs), twins.__getitem__)
        if given != (twin.args, twin.kwargs):
            return False
        twins[node] = twin
    return True
