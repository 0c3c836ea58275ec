"""Selection of sharded parameters that stay gathered between forward and backward.

    forward     gather w1, use, free   gather w2, use, free   gather w3, use
    backward                                                  use, free        gather w2  …

What the forward reads last, the backward reads first. So the last parameter stays whole: freed, it
would be gathered again at once. More stay where the user says so (`ZeRO(keep_mb=…)`), and none
with ``keep_mb=0``.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir.metadata import fake_value, phase_of
from graphopt.ir.placement import placement_of
from graphopt.ir.views import is_pure_view


def kept_parameters(graph: fx.Graph, keep_bytes: float | None) -> set[fx.Node]:
    """The sharded parameters that the backward does not gather again.

    Args:
        graph: with markers; its placeholders have placements.
        keep_bytes: of the parameters that the forward reads last; None: what the backward reads
            before any other.
    """
    last, first = _reads(graph)
    if keep_bytes is None:
        both = last.keys() & first.keys()
        until = max((last[node] for node in both), default=0)
        begin = min(first.values(), default=0)
        return {node for node in both if last[node] == until and first[node] == begin}
    found: set[fx.Node] = set()
    for node in sorted(last, key=last.__getitem__, reverse=True):
        keep_bytes -= fake_value(node).nbytes
        if keep_bytes < 0:
            break
        found.add(node)
    return found


def is_cast(node: fx.Node) -> bool:
    """True if a node only changes the dtype of a value."""
    cast = node.target is torch.ops.aten._to_copy.default
    return cast and set(node.kwargs) == {"dtype"}


def _reads(graph: fx.Graph) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """The positions of each sharded parameter's last use in the forward and first in the backward,
    except by casts and views."""
    parameters: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    first: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        if node.op == "placeholder" and placement_of(node).rows is not None:
            parameters[node] = node
        read = [parameters[source] for source in node.all_input_nodes if source in parameters]
        phase = phase_of(node)
        if not read or phase not in ("forward", "backward"):
            continue
        if len(node.all_input_nodes) == 1 and (is_pure_view(node) or is_cast(node)):
            parameters[node] = read[0]
            continue
        for parameter in read:
            if phase == "forward":
                last[parameter] = place
            else:
                first.setdefault(parameter, place)
    return last, first
