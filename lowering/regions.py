"""Finds the largest regions of a graph that can each be compiled without changing its meaning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import written
from graphopt.ir.effects import Effects
from graphopt.ir.operators import is_fused_optimizer, is_item
from graphopt.lowering.candidates import free_nodes, keep_updates, reasons_to_keep
from graphopt.lowering.levels import levels_of
from graphopt.lowering.log import log_left_out
from graphopt.lowering.lowerable import NodePredicate, reads_metadata_only
from graphopt.lowering.memory import RegionMemory
from graphopt.lowering.updates import gradients, stored_by

MARK = "lowering"
"""Metadata of each call of a marked graph."""


class RegionMark(NamedTuple):
    """The level and the region in which a call runs.

    Attributes:
        level: see `graphopt.lowering.levels`.
        region: number of its region, -1 outside all regions.
        free: true if the node is computed wherever it is needed, inside regions and outside.
    """

    level: int
    region: int = -1
    free: bool = False


RegionPredicate = Callable[[list[fx.Node]], bool]


@dataclass(frozen=True)
class UncompiledNode:
    """A node that stays outside compiled regions, with the reason."""

    node: str
    target: str
    reason: str


@dataclass
class Regions:
    """The result of dividing a graph into regions to compile.

    Attributes:
        nodes: per region, its nodes in graph order.
        breaks: the calls outside all regions.
        free: nodes that are computed wherever they are needed.
        marks: of each call.
        note: why regions are smaller than they could be; empty where they are not.
    """

    nodes: list[list[fx.Node]] = field(default_factory=list)
    breaks: list[UncompiledNode] = field(default_factory=list)
    free: set[fx.Node] = field(default_factory=set)
    marks: dict[fx.Node, RegionMark] = field(default_factory=dict)
    note: str = ""

    def log(self) -> None:
        """Logs the nodes outside the regions, one line for each operator and reason."""
        log_left_out("not lowered", ((b.target, b.node, b.reason) for b in self.breaks))


def mark_regions(
    graph: fx.Graph,
    *,
    node_predicate: NodePredicate | None = None,
    subgraph_predicate: RegionPredicate | None = None,
    min_ops: int = 10,
    random: bool = False,
) -> Regions:
    """Finds the regions of a graph, and marks its nodes with level and region.

    The late nodes of an `IterGraph` are looked at where the next iteration runs them, so that the
    regions of this graph are those of each graph that is derived from it. With its regions the
    graph holds no more at once than without: see `graphopt.lowering.memory`.

    Args:
        node_predicate: asked for each call that could be lowered.
        subgraph_predicate: asked for each region, with its nodes in graph order; once more where
            regions are cut.
        min_ops: regions with fewer ATen operators stay as they are.
        random: whether compiled code may draw random numbers; they are not eager's then.
    """
    effects = Effects(graph)
    reasons = reasons_to_keep(graph, node_predicate, random)
    keep_updates(graph, effects, reasons)
    free = free_nodes(graph, effects, reasons)
    memory = RegionMemory(graph, free)
    while True:
        kept = dict(reasons)
        levels, lowerable = _levels_and_lowerable(graph, effects, kept, free, list(memory.order()))
        found = Regions(free=free)
        _fill(found, graph, levels, lowerable, kept, subgraph_predicate, min_ops)
        if not memory.cut(lambda node: found.marks[node][:2]):  # noqa: B023
            break
    found.note = memory.note()
    for node, mark in found.marks.items():
        node.meta[MARK] = mark
    return found


def _fill(
    found: Regions,
    graph: fx.Graph,
    levels: dict[fx.Node, int],
    lowerable: set[fx.Node],
    reasons: dict[fx.Node, str | None],
    predicate: RegionPredicate | None,
    min_ops: int,
) -> None:
    """Makes regions of the lowerable nodes of each level, and marks all calls."""
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in levels:
            found.marks[node] = RegionMark(levels[node], free=node in found.free)
        if node in lowerable:
            members[levels[node]].append(node)
    for _, nodes in sorted(members.items()):
        refused = _refusal(nodes, found.free, predicate, min_ops)
        if refused is not None:
            reasons |= dict.fromkeys(nodes, refused)
            continue
        for node in nodes:
            found.marks[node] = RegionMark(levels[node], len(found.nodes))
        found.nodes.append(nodes)
    for node, reason in reasons.items():
        if reason is not None and not is_item(node) and node not in found.free:
            found.breaks.append(UncompiledNode(node.name, str(node.target), reason))


def _refusal(
    nodes: list[fx.Node], free: set[fx.Node], predicate: RegionPredicate | None, min_ops: int
) -> str | None:
    inside = set(nodes)
    for node in nodes:
        inside.update(_free_inputs(node, free))
    operators = sum(isinstance(node.target, _compat.OpOverload) for node in inside)
    if operators < min_ops:
        return f"its region has {operators} operators, fewer than {min_ops}"
    if predicate is not None and not predicate(nodes):
        return "subgraph_predicate refused its region"
    return None


def _free_inputs(node: fx.Node, free: set[fx.Node]) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if source in free:
            yield source
            if not reads_metadata_only(source):
                yield from _free_inputs(source, free)


def _levels_and_lowerable(
    graph: fx.Graph,
    effects: Effects,
    reasons: dict[fx.Node, str | None],
    free: set[fx.Node],
    order: Sequence[fx.Node | None],
) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Returns the level of each call, and the calls that are lowerable.

    An update goes with the region that computes what it writes, or stays: elsewhere it would be a
    copy, and outside regions there need not be one. A fused optimizer goes with the region that
    computes one of its gradients, and with the updates of its state.
    """
    lowerable = {node for node, reason in reasons.items() if reason is None} - free
    while True:
        levels = levels_of(graph, order, effects, lowerable)
        alone = [node for node in lowerable if not _is_with_producer(node, levels, lowerable)]
        if not alone:
            return levels, lowerable
        lowerable.difference_update(alone)
        reasons |= dict.fromkeys(alone, "what it writes is computed elsewhere")


def _is_with_producer(node: fx.Node, levels: dict[fx.Node, int], lowerable: set[fx.Node]) -> bool:
    """True if an update or item is in the region of the nodes that it belongs to."""

    def together(other: object) -> bool:
        return other in lowerable and levels[other] == levels[node]

    if is_fused_optimizer(node):
        return any(map(together, gradients(node))) and all(map(together, stored_by(node).values()))
    if is_item(node):
        return together(node.args[0])
    return not written(node) or together(node.args[1])
