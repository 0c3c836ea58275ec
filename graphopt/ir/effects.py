"""Memory effects of a graph: which nodes share a storage, and which read or write it.

    x = placeholder      ┐
    t = t(x)             │ one alias class: t reads nothing, and whoever reads it reads x
    m = mm(a, t)         ┘ (m has memory of its own)
    c = copy_(x, v)      reads v; what reads c reads x, renewed

Two nodes are in one class when they may share memory: by what their operators do
(`graphopt.ir.operators`), or because their `meta["val"]` do. Everything is near-linear in the size
of the graph. Order is that of the graph at the time of the question; whoever moves a node says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir import views
from graphopt.ir.memory_readers import ReadersOfClasses, read_by
from graphopt.ir.metadata import carried_index, known_value, late_group
from graphopt.ir.operators import overwritten
from graphopt.ir.outputs import Outputs, get_outputs


class CallEffects(Protocol):
    """The memory effects of a graph's calls: a protocol with one method for each question."""

    def shared_with(self, node: fx.Node) -> Iterable[fx.Node]:
        """Returns the nodes whose memory the value of `node` may share."""

    def written(self, node: fx.Node) -> list[fx.Node]:
        """Returns the arguments that `node` updates in place."""


class OperatorCalls:
    """The effects of calls of operators, as the operator table has them."""

    shared_with = staticmethod(views.shared_with)
    written = staticmethod(overwritten)


class Effects:
    """The alias classes of one graph, with the readers and writers of each.

    Args:
        calls: what the calls of the graph do; None: it is a graph of operators.
    """

    def __init__(self, graph: fx.Graph, calls: CallEffects | None = None) -> None:
        self.calls = calls or OperatorCalls()
        self._graph = graph
        self._parent: dict[object, object] = {}
        self._inputs: dict[object, fx.Node] = {}
        self._fixed: set[object] = set()
        self._reads: ReadersOfClasses | None = None
        self._lasting: set[object] = set()
        for node in graph.nodes:
            self._add(node)
            if node.op == "output":
                self._fix_returned(get_outputs(graph))

    # ---------------------------------------------------------------------------- alias classes

    def _add(self, node: fx.Node) -> None:
        value = known_value(node)
        if isinstance(value, torch.Tensor):
            key = self._storage(node, value)
            if node in self._parent:
                self.join(node, key)
            else:  # nearly always: it is in no class so far
                self._parent[node] = self._find(key)
        for source in self.calls.shared_with(node):
            self.join(source, node)
        op = node.op
        if op == "placeholder":
            self._inputs[self._find(node)] = node
        elif op == "get_attr":
            self.join(("attribute", node.target), node)
            self._fixed.add(self._find(node))

    def _storage(self, node: fx.Node, value: torch.Tensor) -> object:
        """Returns a key for the storage of a value. Late nodes get keys of their own, unless they
        hold state."""
        key = _key(value)
        if late_group(node) is None and carried_index(node) is None:
            if node.op in ("placeholder", "get_attr"):
                self._lasting.add(key)
            return key
        return key if key in self._lasting else ("last iteration", key)

    def _fix_returned(self, outputs: Outputs) -> None:
        """Records what leaves the graph: it may be read at any time afterwards."""
        for value in (*outputs.results, *outputs.carried):
            if isinstance(value, fx.Node):
                self._fixed.add(self._find(value))

    def _find(self, item: object) -> object:
        parents = self._parent
        parent = parents.setdefault(item, item)
        while parent != (above := parents[parent]):
            parents[item] = above
            item, parent = parent, above
        return parent

    def join(self, a: object, b: object) -> None:
        """Merges the alias classes of `a` and `b`: nodes, or keys of storages."""
        first, second = self._find(a), self._find(b)
        if first == second:
            return
        self._parent[second] = first
        if second in self._inputs:
            self._inputs[first] = self._inputs[second]
        if second in self._fixed:
            self._fixed.add(first)
        if self._reads is not None:
            self._reads.join(first, second)

    def key(self, node: fx.Node) -> object:
        """Returns a key of the alias class of `node`, valid until classes are joined."""
        return self._find(node)

    def keys(self, node: fx.Node) -> list[object]:
        """Returns the keys of the alias classes of `node`, one for each of its results."""
        value = known_value(node)
        if not isinstance(value, (list, tuple)):
            return [self._find(node)]
        tensors = (leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, torch.Tensor))
        storages = (self._storage(node, tensor) for tensor in tensors)
        return list(dict.fromkeys(map(self._find, (node, *storages))))

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """True if two nodes may share storage."""
        return self._find(a) == self._find(b)

    def input_of(self, node: fx.Node) -> fx.Node | None:
        """Returns the placeholder whose storage `node` may share, or None."""
        return self._inputs.get(self._find(node))

    def updated(self) -> set[object]:
        """Returns the keys of the alias classes that the graph writes."""
        states = (state for node in self._graph.nodes for state in self.calls.written(node))
        return {key for state in states for key in self.keys(state)}

    # ------------------------------------------------------------------------------------ reads

    @property
    def reads(self) -> ReadersOfClasses:
        """The readers of each alias class, computed at the first use."""
        if self._reads is None:
            self._reads = ReadersOfClasses(self._graph, self._find)
        return self._reads

    def insert(self, node: fx.Node, before: fx.Node) -> None:
        """Adds a new node with storage of its own, read by `before` alone."""
        self.reads.note(self._find(node), before)

    def moved(self, nodes: Iterable[fx.Node]) -> None:
        """Records that nodes have moved within the graph."""
        for node in nodes:
            for source in read_by(node):
                self.reads.forget_last(self._find(source))

    def read_after(self, node: fx.Node, place: fx.Node) -> bool:
        """True if any node reads the storage of `node` after `place`."""
        return self.reads.after(self._find(node), place, renewed=True) or self.old_read_after(
            node, place
        )

    def old_read_after(self, node: fx.Node, place: fx.Node) -> bool:
        """True if any node after `place` reads the present contents of the storage of `node`.

        Who reads what a later `copy_` puts there does not.
        """
        root = self._find(node)
        if node in self.reads.renewed and self.reads.after(root, place, renewed=True):
            return True
        return self.reads.after(root, place, renewed=False)

    def is_in_flight(self, node: fx.Node) -> bool:
        """True if a collective still reads the storage of `node` when the graph has ended."""
        return self._find(node) in self.reads.in_flight

    def leaves_the_graph(self, node: fx.Node) -> bool:
        """True if the storage of `node` is returned, or is a constant of the module."""
        return self._find(node) in self._fixed


_key = _compat.storage_key_of_value
"""Returns the key of a tensor's storage: a number, which no node equals."""
