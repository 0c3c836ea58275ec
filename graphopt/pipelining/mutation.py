"""Values that are updated in place, and what that means where stages meet."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx, nn

from graphopt.errors import PartitionError
from graphopt.graph_utils import is_view, readers_through_views, written

Regions = Mapping[fx.Node, fx.GraphModule]


def nested_graphs(graph_module: nn.Module, graph: fx.Graph) -> dict[fx.Node, fx.GraphModule]:
    """The `get_attr` nodes of regions, with the graphs they stand for."""
    found: dict[fx.Node, fx.GraphModule] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(graph_module)
        if isinstance(value, fx.GraphModule):
            found[node] = value
    return found


def updated(node: fx.Node, regions: Regions) -> list[fx.Node]:
    """Arguments that a node writes to, also from inside a region that it calls."""
    found = written(node)
    for index, argument in enumerate(node.args):
        if not isinstance(argument, fx.Node) or argument not in regions:
            continue
        operands = node.args[index + 1 :]
        inner = _updated_placeholders(regions[argument])
        found += [x for i, x in enumerate(operands) if i in inner and isinstance(x, fx.Node)]
    return found


def source(node: fx.Node) -> fx.Node:
    """What a node is a view of, through any number of views; itself if it is no view."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def writers(node: fx.Node, regions: Regions) -> list[fx.Node]:
    """Nodes that write to the storage of `node`."""
    return [
        user
        for user in readers_through_views(node)
        if any(source(target) is source(node) for target in updated(user, regions))
    ]


def copy_received_before_update(
    graph: fx.Graph, stage_of: dict[fx.Node, int], regions: Regions
) -> None:
    """Let a stage that updates what it receives work on a copy.

    A received value is a leaf of the stage's autograd graph, which cannot be updated in place.
    Later stages read the copy.

    Raises:
        PartitionError: several views of the value cross the boundary, which cannot be one copy.
    """
    for node in list(graph.nodes):
        if node not in stage_of:
            continue
        for target in updated(node, regions):
            root = source(target)
            if root in stage_of and stage_of[root] < stage_of[node]:
                _copy_for_stage(root, stage_of[node], stage_of)


def _copy_for_stage(root: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> None:
    family = {root, *(n for n in readers_through_views(root) if is_view(n))}
    crossing = {
        member
        for member in family
        if stage_of.get(member, stage) < stage
        and any(_is_used_from(user, stage, stage_of) for user in member.users)
    }
    if len(crossing) != 1:
        names = ", ".join(sorted(node.name for node in crossing))
        raise PartitionError(
            f"stage {stage} updates in place a value that it receives as several views ({names});"
            " use an operation that is not in place, or move the boundary"
        )
    received = crossing.pop()
    readers = [user for user in received.users if _is_used_from(user, stage, stage_of)]
    first = next(n for n in received.graph.nodes if stage_of.get(n) == stage)
    with received.graph.inserting_before(first):
        copy = received.graph.call_function(torch.ops.aten.clone.default, (received,))
    copy.meta = dict(received.meta)
    stage_of[copy] = stage
    for reader in readers:
        reader.replace_input_with(received, copy)


def _is_used_from(user: fx.Node, stage: int, stage_of: dict[fx.Node, int]) -> bool:
    """Whether a user is in `stage` or later; the output is after all stages."""
    return user.op == "output" or stage_of.get(user, -1) >= stage


def _updated_placeholders(region: fx.GraphModule) -> set[int]:
    inner = nested_graphs(region, region.graph)
    placeholders = region.graph.find_nodes(op="placeholder")
    targets = {source(t) for node in region.graph.nodes for t in updated(node, inner)}
    return {index for index, node in enumerate(placeholders) if node in targets}
