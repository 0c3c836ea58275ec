"""The sources of each value of a graph, element by element, with the collectives between.

A list operator (`_fused_adamw`, `_foreach_add`) is a tuple of independent operations, and the parts
that `split` takes from a `cat` are what went into it, also with a collective and pointwise
operators between. Read as single nodes they would make every gradient a source of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.entries import Entry, list_call
from graphopt.ir.families import STATE_NEEDS
from graphopt.ir.memory_readers import values_read
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import operator_of
from graphopt.verify.dependency.any_order import any_order_readers, before_arrangement
from graphopt.verify.dependency.segments import (
    SegmentItems,
    Segments,
    Sources,
    Value,
    concatenates_vectors,
    concatenation,
    size_of,
    slice_range,
    split_ends,
    union,
    whole_of,
)
from graphopt.verify.dependency.signatures import Signature, signature_of

DIRECTLY = frozenset[Signature]()
"""The key of sources that reach a value through no collective."""


class GraphSources:
    """The sources of each value of one graph.

    Args:
        memory: the accesses of the graph.
        sources: the nodes whose values are sources.
        number: returns the number of a source, the same in all graphs that are compared.
        cut: nothing is followed beyond a source.
        kinds: whether collectives of other kinds are told apart; otherwise those of a group are
            one.
    """

    def __init__(
        self,
        memory: MemoryOrder,
        sources: Container[fx.Node],
        number: Callable[[fx.Node], int],
        *,
        cut: bool,
        kinds: bool,
    ) -> None:
        self._memory, self._number, self._kinds = memory, number, kinds
        self._any_order = any_order_readers(memory.graph)
        self._values: dict[fx.Node, Value] = {}
        self._entries: dict[fx.Node, list[Sources]] = {}
        for node in memory.graph.nodes:
            if node in sources and not cut:
                found = whole_of(self._compute(node))
                self._values[node] = union([found, {DIRECTLY: 1 << number(node)}])
            elif node not in sources and node.op != "output":
                self._values[node] = self._compute(node)

    def of(self, value: Entry) -> Sources:
        """Returns the sources of a node, or of one entry of a list."""
        node, item = value
        if item is not None and node in self._entries:
            return self._entries[node][item]
        found = self._value(node)
        if item is not None and isinstance(found, SegmentItems):
            found = found.values[item]
        return whole_of(found)

    def read_by(self, node: fx.Node) -> Sources:
        """Returns the sources of all that a node reads."""
        writes = self._memory.implicit.get(node, {}).values()
        read = (Entry(self._seen(node, source)) for source in values_read(node))
        return union(map(self.of, [*read, *writes]))

    def _value(self, node: fx.Node) -> Value:
        if node not in self._values:  # a source beyond which nothing is followed
            self._values[node] = {DIRECTLY: 1 << self._number(node)}
        return self._values[node]

    def _seen(self, reader: fx.Node, source: fx.Node) -> fx.Node:
        """Returns what a node depends on: of a source that it reads in any order, the value before
        it was arranged."""
        return before_arrangement(source) if reader in self._any_order else source

    def _compute(self, node: fx.Node) -> Value:
        traits = operator_of(node)
        found: Value | None = None
        if traits.item:
            found = self._item(node)
        elif traits.listed:
            found = self._list(node)
        elif traits.elements and node not in self._memory.implicit:
            found = self._by_element(node)
        return self._through(node, self.read_by(node)) if found is None else found

    def _through(self, node: fx.Node, sources: Sources) -> Sources:
        """Adds a collective to what reaches it."""
        if not operator_of(node).collective:
            return sources
        signature = signature_of(node)
        own = {signature if self._kinds else ("a collective", signature[-1])}
        found: Sources = {}
        for through, bits in sources.items():
            found[through | own] = found.get(through | own, 0) | bits
        return found

    def _item(self, node: fx.Node) -> Value:
        source, index = node.args
        assert isinstance(source, fx.Node)
        value = self._value(source)
        if isinstance(value, SegmentItems) and isinstance(index, int) and index < len(value.values):
            return value.values[index]
        return whole_of(value)

    def _list(self, node: fx.Node) -> Value | None:
        """Evaluates a list operator: each entry depends on its own arguments and on the shared
        ones."""
        call = list_call(node)
        if call is None:
            return None
        written = self._memory.implicit.get(node, {})

        def given(read: Iterable[tuple[fx.Node, int | None]]) -> Sources:
            read = list(read)
            writes = [written[source] for source, _ in read if source in written]
            seen = [Entry(self._seen(node, source), item) for source, item in read]
            return union(map(self.of, [*seen, *writes]))

        shared = given((source, None) for source in call.shared)
        entries = [
            self._through(node, union([given(call.reads(item)), shared]))
            for item in range(call.count)
        ]
        self._entries[node] = entries
        if not call.several:
            return SegmentItems(entries)
        lists = [SegmentItems(entries)] * len(fake_value(node))
        for number, names in (_state_needs(node) if not written else {}).items():
            lists[number] = SegmentItems([given(call.needs(i, names)) for i in range(call.count)])
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
        return concatenation(
            (size or 0, self._value(self._seen(node, part)))
            for size, part in zip(sizes, nodes, strict=True)
        )

    def _pointwise(self, node: fx.Node) -> Value | None:
        """Combines operands of one layout segment by segment, with single elements shared by
        all."""
        segments: list[Segments] = []
        single: list[Sources] = []
        for source in node.all_input_nodes:
            value = self._value(self._seen(node, source))
            if isinstance(value, Segments):
                segments.append(value)
            elif _is_single(source):
                single.append(whole_of(value))
            else:
                return None
        if not segments or size_of(known_value(node)) != segments[0].bounds[-1]:
            return None
        if any(other.bounds != segments[0].bounds for other in segments[1:]):
            return None
        runs: Iterable[Sequence[Sources]] = zip(*(part.values for part in segments), strict=True)
        values = [self._through(node, union([*run, *single])) for run in runs]
        return Segments(segments[0].bounds, values)


def missing(wanted: Sources, found: Sources) -> Sources:
    """Returns the sources of `wanted` that `found` lacks. A source must come through at least the
    same collectives."""
    lost: Sources = {}
    for through, bits in wanted.items():
        for other, there in found.items():
            if through <= other:
                bits &= ~there
        if bits:
            lost[through] = bits
    return lost


def _state_needs(node: fx.Node) -> Mapping[int, tuple[str, ...]]:
    """Returns, for each list of results of a fused optimizer, the arguments that it depends on."""
    needs = STATE_NEEDS.get(_compat.operator_name(node.target).partition("::")[2], {})
    count = len(fake_value(node))  # not all overloads return all lists
    return {number: names for number, names in needs.items() if number < count}


def _is_single(node: fx.Node) -> bool:
    value = known_value(node)
    return not isinstance(value, torch.Tensor) or size_of(value) == 1
