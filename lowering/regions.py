"""Find the largest parts of a graph that can each be compiled as one, without harm to the rest.

Every node gets a *level*. Lowerable nodes of one level form one region. The order

    level 0: the nodes that stay, then the region; level 1: the nodes that stay, then the region; …

keeps all dependencies, because

- a node that stays is one level above the lowerable nodes it needs, and a lowerable node is not
  below the nodes that stay which it needs: so there is no way out of a region and back into it;
- what stands after the launch of a collective is not below it, so that no region delays a launch;
- a wait is above all that stands before it, so that what ran between launch and wait still does.

A node that stays and of which a region needs nothing breaks no region. One pass over the graph.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import (
    follows_output_convention,
    get_outputs,
    is_collective,
    is_operator,
    is_wait,
    same_kind,
    tensors_in,
    written,
)
from graphopt.iter_graph import IterGraph
from graphopt.lowering.lowerable import (
    draws,
    is_free,
    is_item,
    reads_metadata_only,
    reason_to_keep,
    unsuitable_tensor,
)
from graphopt.storage import Storages

logger = logging.getLogger("graphopt")

MARK = "lowering"
"""Metadata of each call of a marked graph."""


class Mark(NamedTuple):
    """Where a call runs.

    Attributes:
        level: see the module docstring.
        region: number of its region, -1 outside all regions.
        free: it is computed wherever it is needed, inside regions and outside.
    """

    level: int
    region: int = -1
    free: bool = False


NodePredicate = Callable[[fx.Node], bool]
RegionPredicate = Callable[[list[fx.Node]], bool]


@dataclass(frozen=True)
class Break:
    """A node that stays outside compiled regions, and why."""

    node: str
    target: str
    reason: str


@dataclass
class Regions:
    """The regions of a graph.

    Attributes:
        nodes: per region, its nodes in graph order.
        breaks: the calls outside all regions.
        free: nodes that are computed wherever they are needed.
    """

    nodes: list[list[fx.Node]] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    free: set[fx.Node] = field(default_factory=set)

    def log(self) -> None:
        """Log every break with its reason, those of one operator and reason in one line."""
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for found in self.breaks:
            alike[found.target, found.reason].append(f"%{found.node}")
        for (target, reason), names in alike.items():
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            logger.info("not lowered: %s (%s): %s", target, listed, reason)


def mark_regions(
    graph: fx.Graph,
    *,
    node_predicate: NodePredicate | None = None,
    subgraph_predicate: RegionPredicate | None = None,
    min_ops: int = 10,
    random: bool = False,
) -> Regions:
    """Find the regions of a graph, and mark its nodes with level and region.

    The late nodes of an `IterGraph` are looked at where the next iteration runs them, so that the
    regions of this graph are those of each graph that is derived from it.

    Args:
        node_predicate: asked for each call that could be lowered.
        subgraph_predicate: asked for each region, with its nodes in graph order.
        min_ops: regions with fewer ATen operators stay as they are.
        random: whether compiled code may draw random numbers; they are not eager's then.
    """
    found = Regions()
    reasons = dict(_reasons(graph, node_predicate, random))
    _keep_shared_updates(graph, reasons)
    found.free = _free_nodes(graph, reasons)
    levels, lowerable = _placed(graph, reasons, found.free)
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in levels:
            node.meta[MARK] = Mark(levels[node], free=node in found.free)
        if node in lowerable:
            members[levels[node]].append(node)
    for _, nodes in sorted(members.items()):
        refused = _refusal(nodes, found.free, subgraph_predicate, min_ops)
        if refused is not None:
            reasons |= dict.fromkeys(nodes, refused)
            continue
        for node in nodes:
            node.meta[MARK] = Mark(levels[node], len(found.nodes))
        found.nodes.append(nodes)
    for node, reason in reasons.items():
        if reason is not None and not is_item(node) and node not in found.free:
            found.breaks.append(Break(node.name, str(node.target), reason))
    return found


def _reasons(
    graph: fx.Graph, node_predicate: NodePredicate | None, random: bool
) -> Iterator[tuple[fx.Node, str | None]]:
    """Each call with the reason to keep it, None where it is lowerable."""
    known: dict[fx.Node, str | None] = {}
    updates = set(get_outputs(graph).updates) if follows_output_convention(graph) else set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_item(node) and isinstance(node.args[0], fx.Node):
            reason = known.get(node.args[0], "it is an item of an input")
        else:
            reason = None
            if node not in updates or not _updates_whole(node):
                reason = reason_to_keep(node, random=random)
            if reason is None and node_predicate is not None and not node_predicate(node):
                reason = "node_predicate refused it"
        known[node] = reason
        yield node, reason


def _updates_whole(node: fx.Node) -> bool:
    """Whether a state update gives all of an input a value of its kind."""
    if not is_operator(node.target, "aten::copy_") or len(node.all_input_nodes) != 2:
        return False
    state, value = node.all_input_nodes
    if state.op != "placeholder" or node.args[0] is not state or not same_kind(state, value):
        return False
    return unsuitable_tensor(value.meta["val"]) is None


def _keep_shared_updates(graph: fx.Graph, reasons: dict[fx.Node, str | None]) -> None:
    """Keep updates of state that is also reached through values outside compiled regions, which the
    compiler would take for others."""
    storages = Storages(graph)
    reached = {
        storages.key(node)
        for node, reason in reasons.items()
        if reason is not None and list(tensors_in(node.meta.get("val")))
    }
    states: dict[Any, int] = defaultdict(int)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            states[storages.key(node)] += 1
    for node, reason in reasons.items():
        if reason is None and written(node):
            key = storages.key(node)
            if key in reached or states[key] > 1:
                reasons[node] = "its state is also reached through other values"


def _free_nodes(graph: fx.Graph, reasons: dict[fx.Node, str | None]) -> set[fx.Node]:
    free: set[fx.Node] = set()

    def stays(node: fx.Node) -> bool:
        return node in free or node not in reasons or reasons[node] is not None

    for node in graph.nodes:
        if reasons.get(node, "") is None and is_free(node, stays):
            free.add(node)
    return free


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


def _placed(
    graph: fx.Graph, reasons: dict[fx.Node, str | None], free: set[fx.Node]
) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The level of each call, and the lowerable ones.

    An update goes with the region that computes what it writes, or stays: elsewhere it would be a
    copy, and outside regions there need not be one.
    """
    lowerable = {node for node, reason in reasons.items() if reason is None} - free
    while True:
        levels = _levels(graph, lowerable)
        alone = [node for node in lowerable if written(node) and not _goes(node, levels, lowerable)]
        if not alone:
            return levels, lowerable
        lowerable.difference_update(alone)
        reasons |= dict.fromkeys(alone, "what it writes is computed elsewhere")


def _goes(update: fx.Node, levels: dict[fx.Node, int], lowerable: set[fx.Node]) -> bool:
    """Whether a state update is in the region of the value that it writes."""
    value = update.args[1]
    return value in lowerable and levels[value] == levels[update]  # type: ignore[index]


def _levels(graph: fx.Graph, lowerable: set[fx.Node]) -> dict[fx.Node, int]:
    """The level of each call; see the module docstring."""
    levels: dict[fx.Node, int] = {}
    dependencies = _Dependencies(graph)
    floor, highest = 0, -1
    for node in _order(graph):
        if node is None:
            floor = highest = highest + 1
            continue
        inside = node in lowerable
        level = floor
        if is_item(node):  # with the node that has the results
            level = max((levels[s] for s in node.all_input_nodes if s in levels), default=floor)
        for source in dependencies.of(node):
            if source in levels:
                above = source in lowerable and not inside
                level = max(level, levels[source] + above)
        if is_wait(node):
            level = max(level, highest + 1)
        levels[node] = level
        if is_collective(node):
            floor = level
        if inside:
            highest = max(highest, level)
    return levels


def _order(graph: fx.Graph) -> Iterator[fx.Node | None]:
    """Calls in the order in which they run when an iteration is in flight; None between parts
    that are not to be mixed."""
    late = graph.late if isinstance(graph, IterGraph) else {}
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in late:
            groups[late[node]].append(node)
    for node in graph.nodes:
        if node in groups:
            yield None
            yield from groups[node]
            yield None
        if node.op not in ("placeholder", "get_attr", "output") and node not in late:
            yield node


class _Dependencies:
    """What has to run before each node, asked for in an order in which they may run."""

    def __init__(self, graph: fx.Graph) -> None:
        self._storages = Storages(graph)
        writes = (state for node in graph.nodes for state in written(node))
        self._written = {self._storages.key(state) for state in writes}
        self._last_write: dict[Any, fx.Node] = {}
        self._readers: dict[Any, list[fx.Node]] = defaultdict(list)
        self._last_draw: fx.Node | None = None

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that must run before `node`, among those asked for before."""
        found = [] if reads_metadata_only(node) else list(node.all_input_nodes)
        if draws(node):
            if self._last_draw is not None:
                found.append(self._last_draw)
            self._last_draw = node
        if not self._written:
            return found
        for key in {self._storages.key(source) for source in list(found)} & self._written:
            if key in self._last_write:
                found.append(self._last_write[key])
            self._readers[key].append(node)
        for key in {self._storages.key(state) for state in written(node)}:
            found += [reader for reader in self._readers[key] if reader is not node]
            self._last_write[key], self._readers[key] = node, []
        return found
