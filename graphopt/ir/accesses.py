"""Pairs of reads and writes of one storage that must keep their order.

In the captured dialect nothing depends on the order of reads: what reads after a `copy_` reads its
result. A raw trace has operators that write in place and readers that use another name for what
was written; there a read depends on a node that its arguments do not mention. Both are handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from graphopt.ir.effects import Effects
from graphopt.ir.entries import Entry, list_call
from graphopt.ir.memory_readers import values_read
from graphopt.ir.operators import is_wait, may_alias, operator_of
from graphopt.ir.views import is_pure_view, launch_of, shared_with


class Hazard(NamedTuple):
    """Two accesses of one storage of which at least one writes: "RAW", "WAR" or "WAW"."""

    earlier: fx.Node
    later: fx.Node
    kind: str


class Accesses:
    """The reads and writes of storages that a graph updates. Nodes are added in any order in which
    they may run.

    Attributes:
        implicit: for a node, those of its inputs that another node wrote meanwhile: the value that
            is read is not that of the input node but that of the write.
    """

    def __init__(self, effects: Effects, graph: fx.Graph) -> None:
        self.implicit: dict[fx.Node, dict[fx.Node, Entry]] = {}
        self._effects = effects
        updated = effects.updated()
        found = ((n, [k for k in effects.keys(n) if k in updated]) for n in graph.nodes)
        self._watched = {node: keys for node, keys in found if keys}
        self._last: dict[object, Entry] = {}
        self._readers: dict[object, list[fx.Node]] = {}

    def add(self, node: fx.Node) -> list[Hazard]:
        """Adds a node and returns the earlier nodes that must stay before it.

        Chained: each read belongs to the write before and the write after it, so that there are not
        more than accesses.
        """
        if node.op == "output" or not self._may_access(node):
            return []
        found: list[Hazard] = []
        for source in self._read(node):
            for key in self._watched.get(source, ()):
                found += self._note_read(node, source, key)
        for destination, item in self._written(node):
            for key in self._watched.get(destination, ()):
                found += self._note_write(Entry(node, item), key)
        return found

    def _may_access(self, node: fx.Node) -> bool:
        """True if a node reads or writes an updated storage, or waits; a quick test for most
        nodes."""
        return is_wait(node) or not self._watched.keys().isdisjoint(node.all_input_nodes)

    def last_write(self, node: fx.Node) -> Entry | None:
        """Returns the last write so far to the storage of `node`, or None."""
        return self._last.get(self._effects.key(node))

    def _note_read(self, node: fx.Node, source: fx.Node, key: object) -> Iterator[Hazard]:
        last = self._last.get(key)
        if last is not None:
            yield Hazard(last.node, node, "RAW")
            if _value_of(source) is not last.node:
                self.implicit.setdefault(node, {})[source] = last
        self._readers.setdefault(key, []).append(node)

    def _note_write(self, write: Entry, key: object) -> Iterator[Hazard]:
        last = self._last.get(key)
        if last is not None and last.node is not write.node:
            yield Hazard(last.node, write.node, "WAW")
        for reader in self._readers.pop(key, ()):
            if reader is not write.node:
                yield Hazard(reader, write.node, "WAR")
        self._last[key] = write

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """Returns the inputs that a node reads; views and items read nothing."""
        known = operator_of(node)
        if known.item or known.metadata_only or is_pure_view(node):
            return []
        launch = launch_of(node) if known.wait else None
        if launch is not None and not operator_of(launch).writes:
            # Also one that works on a copy: it may be given its in-place form later.
            return [*node.all_input_nodes, *launch.all_input_nodes]
        return values_read(node)

    def _written(self, node: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
        """Yields what a node writes. A wait completes the in-place write of its collective."""
        writer = launch_of(node) if is_wait(node) else node
        destinations = [] if writer is None else self._effects.calls.written(writer)
        call = list_call(writer) if writer is not None and destinations else None
        if call is None:
            yield from ((destination, None) for destination in dict.fromkeys(destinations))
            return
        for item in range(call.count):
            yield from ((destination, item) for destination in call.writes(item))


class MemoryOrder:
    """The memory accesses of one graph in its present order.

    Attributes:
        graph: the graph.
        hazards: pairs of accesses that must keep their order.
        implicit: see `Accesses`.
        final: placeholder -> the write after which its storage is not written any more.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        accesses = Accesses(Effects(graph), graph)
        self.hazards = [hazard for node in graph.nodes for hazard in accesses.add(node)]
        self.implicit = accesses.implicit
        self.final: dict[fx.Node, Entry] = {}
        for node in graph.nodes:
            last = accesses.last_write(node) if node.op == "placeholder" else None
            if last is not None:
                self.final[node] = last


def _value_of(node: fx.Node) -> fx.Node:
    """Returns the write or the original node of which a node is a view."""
    while may_alias(node) and not operator_of(node).writes:
        sources = shared_with(node)
        if not sources:
            break
        node = sources[0]
    return node
