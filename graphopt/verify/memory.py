"""Which reads and writes of one storage must keep their order.

In the captured dialect nothing depends on the order of reads: what reads after a `copy_` reads its
result. A raw trace has operators that write in place and readers that use another name for what
was written; there a read depends on a node that its arguments do not mention. Both are handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import written
from graphopt.verify.traits import traits_of


class Write(NamedTuple):
    """A node that writes; `item`: which element of its lists, if it is a list operator."""

    node: fx.Node
    item: int | None = None


class Hazard(NamedTuple):
    """Two accesses of one storage of which at least one writes: "RAW", "WAR" or "WAW"."""

    earlier: fx.Node
    later: fx.Node
    kind: str


class Memory:
    """The accesses of one graph to storages that the graph writes.

    Attributes:
        hazards: pairs of accesses that must keep their order. Chained: each read belongs to the
            write before and the write after it, so that there are not more than accesses.
        implicit: for a node, those of its inputs that another node wrote meanwhile: the value that
            is read is not that of the input node but that of the write.
        final: placeholder -> the write after which its storage is not written any more.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.hazards: list[Hazard] = []
        self.implicit: dict[fx.Node, dict[fx.Node, Write]] = {}
        self.final: dict[fx.Node, Write] = {}
        self._views: dict[fx.Node, fx.Node] = {}
        writers = [node for node in graph.nodes if traits_of(node).writes]
        if not writers:
            return
        self._root = self._roots(graph)
        self._watched = {self._root[n] for writer in writers for n in written(writer)}
        self._last: dict[fx.Node, Write] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._access(node)
        for node in graph.nodes:
            if node.op == "placeholder" and self._root[node] in self._last:
                self.final[node] = self._last[self._root[node]]

    def _roots(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """The first node over the storage of each node."""
        roots: dict[fx.Node, fx.Node] = {}
        owners: dict[int, fx.Node] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            key = _compat.storage_key(value) if isinstance(value, torch.Tensor) else None
            base = self._base_of(node)
            if base is not None:
                self._views[node] = base
                root = roots[base]
            else:
                root = node if key is None else owners.get(key, node)
            roots[node] = root
            if key is not None:
                owners.setdefault(key, root)
        return roots

    def _base_of(self, node: fx.Node) -> fx.Node | None:
        """What a node is a view of, by schemas: an item of several results is a view only if they
        are views themselves."""
        traits = traits_of(node)
        if not traits.view or not node.all_input_nodes:
            return None
        base = node.args[0]
        if not isinstance(base, fx.Node):
            return None
        several = isinstance(base.meta.get("val"), (list, tuple))
        if traits.item and several and base not in self._views:
            return None
        return base

    def _access(self, node: fx.Node) -> None:
        for source in self._reads(node):
            root = self._root[source]
            last = self._last.get(root)
            if last is not None:
                self.hazards.append(Hazard(last.node, node, "RAW"))
                if self._written_as(source) is not last.node:
                    self.implicit.setdefault(node, {})[source] = last
            self._readers.setdefault(root, []).append(node)
        for destination, item in self._writes(node):
            root = self._root[destination]
            last = self._last.get(root)
            if last is not None and last.node is not node:
                self.hazards.append(Hazard(last.node, node, "WAW"))
            readers = self._readers.pop(root, ())
            self.hazards += [Hazard(r, node, "WAR") for r in readers if r is not node]
            self._last[root] = Write(node, item)

    def _reads(self, node: fx.Node) -> Iterator[fx.Node]:
        """Inputs over watched storages that the node reads: views do not read."""
        if node.op == "output":
            return
        traits = traits_of(node)
        if traits.view and not traits.writes:
            return
        inputs = node.all_input_nodes
        if traits.wait:  # until then the collective reads what it sends
            launch = launch_of(node)
            if launch is not None and not traits_of(launch).writes:
                inputs = [*inputs, *launch.all_input_nodes]
        for source in inputs:
            if self._root[source] not in self._watched:
                continue
            if source not in self.overwritten(node):
                yield source

    def overwritten(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The input of a `copy_` that it replaces as a whole, and therefore does not read."""
        if not traits_of(node).copies:
            return ()
        destination = node.args[0]
        if destination is node.args[1] or not isinstance(destination, fx.Node):
            return ()
        return () if destination in self._views else (destination,)

    def _writes(self, node: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
        traits = traits_of(node)
        writer = launch_of(node) if traits.wait else node
        if writer is None or not traits_of(writer).writes:
            return
        destinations = set(written(writer))
        if not traits.listed:
            yield from ((destination, None) for destination in destinations)
            return
        for argument in (*node.args, *node.kwargs.values()):
            if not isinstance(argument, (list, tuple)):
                continue
            for item, element in enumerate(argument):
                if isinstance(element, fx.Node) and element in destinations:
                    yield element, item

    def _written_as(self, node: fx.Node) -> fx.Node:
        """The write or the original that a node is a view of, by the arguments of nodes."""
        while node in self._views and not traits_of(node).writes:
            node = self._views[node]
        return node


def launch_of(wait: fx.Node) -> fx.Node | None:
    """The collective that a wait ends, found through items and views."""
    node: object = next(iter(wait.all_input_nodes), None)
    while isinstance(node, fx.Node) and traits_of(node).view and not traits_of(node).collective:
        node = node.args[0]
    if isinstance(node, fx.Node) and traits_of(node).collective:
        return node
    return None
