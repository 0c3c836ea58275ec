"""Matching of two graphs' nodes, and selection of the nodes whose sources must be compared.

*Anchors* are nodes that both graphs have: a pass left them in place. What a pass removed or made,
and what it may rebuild from other pieces (lists and their items, collectives, buckets), lies
between anchors. An anchor whose inputs are the same is settled, and only the others are compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt.graph_utils import get_outputs
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import Entry
from graphopt.ir.operators import operator_of
from graphopt.verify.dependency.segments import Sources, segmented
from graphopt.verify.dependency.sources import GraphSources
from graphopt.verify.values.remembered_calls import same_arguments

End = tuple[str, Hashable]
"""A place where a value leaves the graph: ("result", 0), ("carried", 1), ("state", placeholder)."""


@dataclass(frozen=True)
class Sink:
    """A node or output of both graphs whose sources are compared.

    `before` and `after` are the nodes (with `item`s of list operators) for an anchor, and the
    values that leave the graph for an end.
    """

    before: Entry
    after: Entry
    end: End | None = None

    def sources(self, graph: GraphSources, place: Entry) -> Sources:
        """Returns its sources in one of the graphs, where `place` is its `before` or `after`."""
        return graph.read_by(place.node) if self.end is None else graph.of(place)


def correspondence_by_name(before: fx.Graph, after: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps the nodes of `after` to the nodes of `before` with the same name."""
    names = {node.name: node for node in before.nodes}
    return {node: names[node.name] for node in after.nodes if node.name in names}


class NodeMatching:
    """The anchors of two graphs, and the sinks to compare.

    Attributes:
        same: node of `after` -> node of `before` that does the same.
        anchors: node of `after` -> node of `before`, a part of `same`.
        sinks: what has to be compared.
        constants: ends where a constant was exchanged.
    """

    def __init__(
        self, before: MemoryOrder, after: MemoryOrder, correspondence: Mapping[fx.Node, fx.Node]
    ) -> None:
        self.same = same_nodes(before.graph, after.graph, correspondence)
        rebuilt = segmented(before.graph), segmented(after.graph)
        self.anchors = {
            new: old
            for new, old in self.same.items()
            if new not in rebuilt[1] and old not in rebuilt[0] and not _is_between_anchors(new)
        }
        self._implicit = before.implicit, after.implicit
        self._settled: set[fx.Node] = set()
        self.sinks: list[Sink] = []
        for node in after.graph.nodes:
            self._compare(node)
        self.constants: list[End] = []
        self._compare_results(before.graph, after.graph)
        self._compare_state(before, after)

    def _compare(self, node: fx.Node) -> None:
        old = self.same.get(node)
        if old is None:
            return
        settled = self._reads_the_same(node, old)
        if node in self.anchors:
            if not settled:
                self.sinks.append(Sink(Entry(old), Entry(node)))
        elif settled and self._equal((node.args, node.kwargs), (old.args, old.kwargs)):
            self._settled.add(node)

    def _reads_the_same(self, new: fx.Node, old: fx.Node) -> bool:
        if new in self._implicit[1] or old in self._implicit[0]:
            return False
        ours, theirs = new.all_input_nodes, old.all_input_nodes
        if len(ours) != len(theirs):
            return False
        return all(map(self._is_settled, ours, theirs))

    def _is_settled(self, new: fx.Node, old: fx.Node) -> bool:
        return self.same.get(new) is old and (new in self.anchors or new in self._settled)

    def _equal(self, new: Any, old: Any) -> bool:
        """True if two arguments are equal, where nodes are equal if they correspond."""
        return same_arguments(new, old, lambda node, was: self.same.get(node) is was)

    def _compare_results(self, before: fx.Graph, after: fx.Graph) -> None:
        old, new = get_outputs(before), get_outputs(after)
        for name, olds, news in (
            ("result", old.results, new.results),
            ("carried", old.carried, new.carried),
        ):
            for slot, (was, now) in enumerate(zip(olds, news, strict=False)):
                if isinstance(was, fx.Node) and isinstance(now, fx.Node):
                    self._compare_end((name, slot), Entry(was), Entry(now))
                elif not self._equal(now, was):
                    self.constants.append((name, slot))

    def _compare_state(self, before: MemoryOrder, after: MemoryOrder) -> None:
        now = {placeholder.target: write for placeholder, write in after.final.items()}
        for placeholder, write in before.final.items():
            if placeholder.target in now:
                self._compare_end(("state", placeholder), write, now[placeholder.target])

    def _compare_end(self, end: End, old: Entry, new: Entry) -> None:
        if not (self._is_settled(new.node, old.node) and new.item == old.item):
            self.sinks.append(Sink(old, new, end))


def same_nodes(
    before: fx.Graph, after: fx.Graph, correspondence: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Maps nodes of `after` to corresponding nodes of `before` that call the same target."""
    inputs = {node.target: node for node in before.find_nodes(op="placeholder")}
    same: dict[fx.Node, fx.Node] = {}
    for node in after.nodes:
        old = inputs.get(node.target) if node.op == "placeholder" else correspondence.get(node)
        if old is None or node.op == "output":
            continue
        if old.op == node.op and old.target == node.target:
            same[node] = old
    return same


def _is_between_anchors(node: fx.Node) -> bool:
    """True if a pass may rebuild a node from other pieces, such as an item, a list or a
    collective."""
    traits = operator_of(node)
    return traits.item or traits.listed or traits.wait or traits.collective
