"""The nodes (sources) that each compared node or output (sink) of one graph is computed from."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import Entry
from graphopt.verify.dependency.any_order import AnyOrder
from graphopt.verify.dependency.flow import DataFlow
from graphopt.verify.dependency.labels import CollectiveLabels
from graphopt.verify.dependency.reach import LabelReach, union


@dataclass(frozen=True)
class SinkPlace:
    """A sink in one graph: a node, or a value that leaves the graph (`end`)."""

    write: Entry
    end: bool


class SinkSources:
    """The sources that reach each sink in one of two compared graphs.

    Args:
        places: in the same order for all sides that are compared.
        cut: the anchors, beyond which nothing is followed; None: there are none.

    Attributes:
        begins: the anchors that something between anchors, or a place, reads.
    """

    def __init__(
        self,
        graph: fx.Graph,
        memory: MemoryOrder,
        places: Sequence[SinkPlace],
        labels: CollectiveLabels,
        cut: Container[fx.Node] | None = None,
    ) -> None:
        any_order = AnyOrder(graph)
        needed = None if cut is None else _needed(graph, memory, any_order, places, cut)
        self._flow = DataFlow(graph, memory, labels, any_order, cut or (), needed)
        self._needs = [
            [self._flow.vertex(*place.write)] if place.end else self._flow.sources(place.write.node)
            for place in places
        ]
        self._reach = LabelReach(self._flow, labels)
        self.begins = self._flow.begins

    def states(self, sources: Sequence[fx.Node]) -> dict[int, int]:
        """Maps the number of each sink that `sources` reach to the set of these sources, as
        bits."""
        bits: dict[int, int] = {}
        for number, source in enumerate(sources):
            vertex = self._flow.known(source)
            if vertex is not None:
                bits[vertex] = number
        states = self._reach.states(bits)
        found = ((place, union(states, needs)) for place, needs in enumerate(self._needs))
        return {place: state for place, state in found if state}


def _needed(
    graph: fx.Graph,
    memory: MemoryOrder,
    any_order: AnyOrder,
    places: Sequence[SinkPlace],
    cut: Container[fx.Node],
) -> set[fx.Node]:
    """Returns the nodes between the anchors `cut` and the sinks."""
    needed: set[fx.Node] = set()
    for place in places:
        nodes = [place.write.node] if place.end else _inputs(place.write.node, memory, any_order)
        needed.update(node for node in nodes if node not in cut)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(
                source for source in _inputs(node, memory, any_order) if source not in cut
            )
    return needed


def _inputs(node: fx.Node, memory: MemoryOrder, any_order: AnyOrder) -> list[fx.Node]:
    """Returns the nodes whose values `node` reads, implicit reads of memory included."""
    writes = memory.implicit.get(node, {})
    read = (any_order.read_by(node, source) for source in node.all_input_nodes)
    return [*read, *(write.node for write in writes.values())]
