"""Views around what is sharded, cancelled or moved before a graph is rewritten to rows."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from graphopt.ir.metadata import fake_value, known_value, set_value
from graphopt.ir.views import is_pure_view


def cancel_views(graph: fx.Graph) -> None:
    """Removes pairs of views that undo each other, such as two transposes."""
    for node in list(graph.nodes):
        if not _is_view_of_one(node):
            continue
        source = node.all_input_nodes[0]
        while _is_view_of_one(source):
            source = source.all_input_nodes[0]
            if _is_view_like(node, source):
                node.replace_all_uses_with(source)
                break
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_view_of_one(node):
            graph.erase_node(node)  # nothing is gathered for what nobody reads


def average_behind_views(marker: fx.Node) -> None:
    """Moves a gradient marker behind the views that the optimizer reads: rows of a transposed
    gradient would be columns of its parameter."""
    graph = marker.graph
    while len(marker.users) == 1:
        (view,) = marker.users
        if not _is_view_of_one(view):
            return
        with graph.inserting_before(marker):
            first = graph.node_copy(view, lambda _: cast(fx.Node, marker.args[0]))
        first.meta = dict(view.meta)
        set_value(marker, fake_value(view))
        marker.args = (first, *marker.args[1:])
        view.replace_all_uses_with(marker)
        graph.erase_node(view)


def _is_view_of_one(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_pure_view(node) or len(node.all_input_nodes) != 1:
        return False
    return isinstance(known_value(node), torch.Tensor)


def _is_view_like(view: fx.Node, source: fx.Node) -> bool:
    """True if a view has all of its source, as that lies in memory."""
    one, other = fake_value(view), known_value(source)
    if not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    lie_alike = one.stride() == other.stride() and one.dtype == other.dtype
    return bool(lie_alike and one.storage_offset() == other.storage_offset())
