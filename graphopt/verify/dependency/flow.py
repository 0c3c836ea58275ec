"""The sources of each value of a graph, element by element.

A list operator (`_fused_adamw`, `_foreach_add`) is a tuple of independent operations, and the parts
that `split` takes from a `cat` are what went into it, also with a collective and pointwise
operators between. Read as single nodes they would make every gradient a source of every parameter.

A `DataFlow` is a graph of *vertices*: integers in topological order. A node has one or, as a list
or a concatenation, several.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import list_call
from graphopt.ir.families import STATE_NEEDS
from graphopt.ir.memory_readers import values_read
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import operator_of
from graphopt.verify.dependency.any_order import AnyOrder
from graphopt.verify.dependency.labels import CollectiveLabels, signature_of
from graphopt.verify.dependency.segments import (
    SegmentItems,
    Segments,
    Value,
    concatenates_vectors,
    concatenation,
    size_of,
    slice_range,
    split_ends,
)


class DataFlow:
    """The data-flow graph of one graph: vertices for nodes, entries of lists, and runs of elements.

    Args:
        memory: the accesses of the graph.
        labels: collectives that values pass through, shared by the flows that are compared.
        any_order: the nodes of the graph that read elements in any order.
        cut: nodes at which the flow begins anew: their vertices have no predecessors.
        needed: nodes that get vertices, beside those in `cut`; None for all.

    Attributes:
        predecessors: for each vertex, the vertices it is computed from.
        launched: vertex -> number of the collective that it launches.
        begins: the nodes in `cut` that something reads, in the order in which it does.
    """

    def __init__(
        self,
        graph: fx.Graph,
        memory: MemoryOrder,
        labels: CollectiveLabels,
        any_order: AnyOrder,
        cut: Container[fx.Node] = (),
        needed: Container[fx.Node] | None = None,
    ) -> None:
        self.predecessors: list[list[int]] = []
        self.launched: dict[int, int] = {}
        self.begins: dict[fx.Node, int] = {}
        self._memory = memory
        self._labels = labels
        self._any_order = any_order
        self._values: dict[fx.Node, Value] = {}
        self._entries: dict[fx.Node, list[int]] = {}
        for node in graph.nodes:
            if node.op != "output" and node not in cut and (needed is None or node in needed):
                self._values[node] = self._compute(node)

    def vertex(self, node: fx.Node, item: int | None = None) -> int:
        """Returns the data-flow vertex of a whole node, or of one entry of a list."""
        if item is None:
            return self._whole(self._value(node))
        if node in self._entries:
            return self._entries[node][item]
        value = self._value(node)
        return self._whole(value.values[item] if isinstance(value, SegmentItems) else value)

    def known(self, node: fx.Node) -> int | None:
        """Returns the vertex of a whole node, or None if no needed node reads it."""
        return self.vertex(node) if node in self._values else None

    def sources(self, node: fx.Node) -> list[int]:
        """Returns the vertices that a whole node is computed from."""
        writes = self._memory.implicit.get(node, {}).values()
        read = (self._any_order.read_by(node, source) for source in values_read(node))
        return [*map(self.vertex, read), *(self.vertex(*write) for write in writes)]

    def _value(self, node: fx.Node) -> Value:
        if node not in self._values:  # a node at which the flow is cut
            self._values[node] = self.begins[node] = self._new(())
        return self._values[node]

    def _new(self, predecessors: Iterable[int]) -> int:
        self.predecessors.append(list(predecessors))
        return len(self.predecessors) - 1

    def _whole(self, value: Value) -> int:
        if isinstance(value, int):
            return value
        if value.joined is None:
            value.joined = self._new([self._whole(part) for part in value.values])
        return value.joined

    def _compute(self, node: fx.Node) -> Value:
        traits = operator_of(node)
        if traits.item:
            return self._item(node)
        if traits.listed:
            return self._list(node)
        if traits.elements and node not in self._memory.implicit:
            by_element = self._by_element(node)
            if by_element is not None:
                return by_element
        return self._computed(node, self.sources(node))

    def _computed(self, node: fx.Node, needs: Iterable[int]) -> int:
        vertex = self._new(needs)
        if operator_of(node).collective:
            self.launched[vertex] = self._labels.number(signature_of(node))
        return vertex

    def _item(self, node: fx.Node) -> Value:
        source, index = node.args
        assert isinstance(source, fx.Node)
        value = self._value(source)
        if isinstance(value, SegmentItems) and isinstance(index, int) and index < len(value.values):
            return value.values[index]
        return self._whole(value)

    def _list(self, node: fx.Node) -> Value:
        """Evaluates a list operator: each entry depends on its own arguments and on the shared
        ones."""
        call = list_call(node)
        if call is None:
            return self._computed(node, self.sources(node))
        written = self._memory.implicit.get(node, {})
        shared = [self.vertex(source) for source in call.shared]
        shared += [self.vertex(*written[source]) for source in call.shared if source in written]
        entries: list[int] = []
        for item in range(call.count):
            read = call.reads(item)
            needs = [
                self.vertex(self._any_order.read_by(node, source), number)
                for source, number in read
            ]
            if written:
                needs += [self.vertex(*written[source]) for source, _ in read if source in written]
            entries.append(self._computed(node, needs + shared))
        self._entries[node] = entries
        if not call.several:
            return SegmentItems(entries)
        lists = [SegmentItems(entries)] * len(fake_value(node))
        for number, names in (_state_needs(node) if not written else {}).items():
            lists[number] = SegmentItems(
                [
                    self._computed(node, [self.vertex(*needed) for needed in call.needs(i, names)])
                    for i in range(call.count)
                ]
            )
        return SegmentItems(lists)

    def _by_element(self, node: fx.Node) -> Value | None:
        """Returns the value of an operator that keeps elements apart, or None for any other."""
        kind = operator_of(node).elements
        if kind == "cat":
            return self._cat(node)
        if kind == "pointwise":
            return self._pointwise(node)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        value = self._value(source)
        if kind == "same":
            return value if isinstance(value, Segments) or operator_of(node).wait else None
        if not isinstance(value, Segments):
            return None
        if kind == "slice":
            run = slice_range(node, fake_value(source))
            return None if run is None else value.part(*run)
        ends = split_ends(node)
        if ends is None:
            return None
        return SegmentItems([value.part(*run) for run in zip([0, *ends], ends, strict=False)])

    def _cat(self, node: fx.Node) -> Value | None:
        parts = node.args[0]
        if not concatenates_vectors(node) or not isinstance(parts, (list, tuple)):
            return None
        nodes = [part for part in parts if isinstance(part, fx.Node)]
        sizes = [size_of(known_value(part)) for part in nodes]
        if None in sizes:
            return None
        read = (self._value(self._any_order.read_by(node, part)) for part in nodes)
        return concatenation((size or 0, value) for size, value in zip(sizes, read, strict=True))

    def _pointwise(self, node: fx.Node) -> Value | None:
        """Combines operands of one layout segment by segment, with single elements shared by
        all."""
        segments: list[Segments] = []
        single: list[int] = []
        for source in node.all_input_nodes:
            value = self._value(self._any_order.read_by(node, source))
            if isinstance(value, Segments):
                segments.append(value)
            elif _is_single(source):
                single.append(self._whole(value))
            else:
                return None
        if not segments or size_of(known_value(node)) != segments[0].bounds[-1]:
            return None
        if any(other.bounds != segments[0].bounds for other in segments[1:]):
            return None
        runs: Iterable[Sequence[int]] = zip(*(part.values for part in segments), strict=True)
        return Segments(segments[0].bounds, [self._computed(node, [*run, *single]) for run in runs])


def _state_needs(node: fx.Node) -> Mapping[int, tuple[str, ...]]:
    """Returns, for each list of results of a fused optimizer, the arguments that it depends on."""
    needs = STATE_NEEDS.get(_compat.operator_name(node.target).partition("::")[2], {})
    count = len(fake_value(node))  # not all overloads return all lists
    return {number: names for number, names in needs.items() if number < count}


def _is_single(node: fx.Node) -> bool:
    value = known_value(node)
    return not isinstance(value, torch.Tensor) or size_of(value) == 1
