"""In-place updates in an exported graph, and their treatment at stage boundaries."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx, nn

from graphopt.errors import PartitionError
from graphopt.graph_utils import written
from graphopt.ir.effects import Effects, OperatorCalls

Regions = Mapping[fx.Node, fx.GraphModule]


def nested_graphs(graph_module: nn.Module, graph: fx.Graph) -> dict[fx.Node, fx.GraphModule]:
    """The `get_attr` nodes of nested graphs (checkpoint, cond), with those graphs."""
    found: dict[fx.Node, fx.GraphModule] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(graph_module)
        if isinstance(value, fx.GraphModule):
            found[node] = value
    return found


def updated(node: fx.Node, regions: Regions) -> list[fx.Node]:
    """The arguments that a node writes, also from inside a nested graph that it calls."""
    found = written(node)
    for index, argument in enumerate(node.args):
        if not isinstance(argument, fx.Node) or argument not in regions:
            continue
        operands = node.args[index + 1 :]
        inner = _updated_placeholders(regions[argument])
        found += [x for i, x in enumerate(operands) if i in inner and isinstance(x, fx.Node)]
    return found


class Mutations:
    """The writers of each value's storage, those inside nested graphs included.

    Args:
        regions: the nodes that stand for graphs, with those graphs.
    """

    def __init__(self, graph: fx.Graph, regions: Regions) -> None:
        self._effects = Effects(graph, _RegionCalls(regions))
        self._members: dict[object, list[fx.Node]] = defaultdict(list)
        self._writers: dict[object, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            self._members[self._effects.key(node)].append(node)
            for target in updated(node, regions):
                self._writers[self._effects.key(target)].append(node)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        return self._writers[self._effects.key(node)]

    def family(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that may share the storage of `node`, in graph order."""
        return self._members[self._effects.key(node)]


class _RegionCalls(OperatorCalls):
    """The effects of operators and of calls of nested graphs."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def written(self, node: fx.Node) -> list[fx.Node]:
        return updated(node, self._regions)


def copy_received_before_update(
    graph: fx.Graph, stage_of: dict[fx.Node, int], regions: Regions
) -> None:
    """Makes a stage that updates a received value work on a copy of it.

    A received value is a leaf of the stage's autograd graph, which cannot be updated in place.
    Later stages read the copy.

    Raises:
        PartitionError: several views of the value cross the boundary, which cannot be one copy.
    """
    mutations = Mutations(graph, regions)
    for node in list(graph.nodes):
        if node not in stage_of:
            continue
        for target in updated(node, regions):
            family = mutations.family(target)
            root = family[0]
            if root in stage_of and stage_of[root] < stage_of[node]:
                _copy_for_stage(family, stage_of[node], stage_of)
                mutations = Mutations(graph, regions)


def _copy_for_stage(family: list[fx.Node], stage: int, stage_of: dict[fx.Node, int]) -> None:
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
    """True if a user runs in `stage` or later; the output comes after all stages."""
    return user.op == "output" or stage_of.get(user, -1) >= stage


def _updated_placeholders(region: fx.GraphModule) -> set[int]:
    mutations = Mutations(region.graph, nested_graphs(region, region.graph))
    placeholders = region.graph.find_nodes(op="placeholder")
    return {index for index, node in enumerate(placeholders) if mutations.writers(node)}
