"""Which nodes of a functional graph share storage, and until when each storage is read."""

from __future__ import annotations

import operator
import sys

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import (
    Outputs,
    get_outputs,
    is_collective,
    is_operator,
    is_view,
    is_wait,
    may_alias,
)

_ONE_TENSOR_TWICE = (
    "aten::mkldnn_rnn_layer_backward",
    "aten::_cudnn_rnn_backward",
    "aten::_thnn_fused_lstm_cell_backward",
    "aten::_thnn_fused_lstm_cell_backward_impl",
    "aten::_thnn_fused_gru_cell_backward",
)
"""Operators that may return one tensor as several of their results."""


_COPY_WHAT_THEY_SEND = (
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_reduce_coalesced",
    "_c10d_functional::broadcast",
)
"""Collectives that work on a copy, or in their in-place form on the tensor itself."""


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Inputs whose values matter: the destination of a `copy_` does not."""
    if node.op == "output":
        return []
    if is_operator(node.target, "aten::copy_"):
        return [source for source in node.args[1:2] if isinstance(source, fx.Node)]
    if is_wait(node):
        launches = node.all_input_nodes
        return [
            *launches,
            *(sent for n in launches if _reads_until_wait(n) for sent in n.all_input_nodes),
        ]
    return node.all_input_nodes


def _reads_until_wait(node: fx.Node) -> bool:
    """Whether a node launches a collective that reads what it sends until its wait."""
    return is_collective(node) and not is_operator(node.target, *_COPY_WHAT_THEY_SEND)


class Storages:
    """Alias classes of the nodes of one graph, kept up to date while nodes become in-place.

    Two nodes are in one class when they may share storage: by the alias annotations of schemas, or
    because their `meta["val"]` do.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[object, object] = {}
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._last_read: dict[object, int] = {}
        self._last_renewed_read: dict[object, int] = {}
        self._renewed: set[fx.Node] = set()
        self._fixed: set[object] = set()
        self._inputs: dict[object, fx.Node] = {}
        for node in graph.nodes:
            self._add(node)
        self._add_outputs(get_outputs(graph))

    def _find(self, item: object) -> object:
        parent = self._parent.setdefault(item, item)
        while parent != self._parent[parent]:
            self._parent[item] = self._parent[parent]
            item, parent = parent, self._parent[parent]
        return parent

    def key(self, node: fx.Node) -> object:
        """Stands for the alias class of `node`, until nodes are joined."""
        return self._find(node)

    def join(self, a: fx.Node, b: fx.Node) -> None:
        """Say that `a` and `b` share storage from now on."""
        self._join(a, b)

    def _join(self, a: object, b: object) -> None:
        first, second = self._find(a), self._find(b)
        if first == second:
            return
        self._parent[second] = first
        for reads in (self._last_read, self._last_renewed_read):
            reads[first] = max(reads.get(first, -1), reads.get(second, -1))
        if second in self._fixed:
            self._fixed.add(first)
        if second in self._inputs:
            self._inputs[first] = self._inputs[second]

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._join(node, ("storage", _compat.storage_key(value)))
        if may_alias(node) or is_wait(node):
            for source in node.all_input_nodes[:1]:
                if self._carries_one_storage(source):
                    self._join(source, node)
        if node.target is operator.getitem:
            source = node.all_input_nodes[0]
            if is_operator(source.target, *_ONE_TENSOR_TWICE):
                self._join(source, node)
        of_renewed = may_alias(node) and not self._renewed.isdisjoint(node.all_input_nodes[:1])
        if of_renewed or is_operator(node.target, "aten::copy_"):
            self._renewed.add(node)
        unfinished = _reads_until_wait(node) and not any(map(is_wait, node.users))
        for source in _read_by(node):
            root = self._find(source)
            reads = self._last_renewed_read if source in self._renewed else self._last_read
            reads[root] = max(reads.get(root, -1), self.position[node])
            if unfinished:  # it reads what it sends until a wait in a later graph
                reads[root] = sys.maxsize
        if node.op in ("placeholder", "get_attr"):
            root = self._find(node)
            if node.op == "placeholder":
                self._inputs[root] = node
            else:
                self._fixed.add(root)

    def _carries_one_storage(self, source: fx.Node) -> bool:
        """Whether a view of `source` shares its storage: items of several results need not."""
        return isinstance(source.meta.get("val"), torch.Tensor) or is_view(source)

    def _add_outputs(self, outputs: Outputs) -> None:
        for value in (*outputs.results, *outputs.carried):
            if isinstance(value, fx.Node):
                self._fixed.add(self._find(value))

    def insert(self, node: fx.Node, before: fx.Node) -> None:
        """Take in a new node with storage of its own, read by `before` alone."""
        self.position[node] = self.position[before]
        self._last_read[self._find(node)] = self.position[before]

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes may share storage."""
        return self._find(a) == self._find(b)

    def read_after(self, node: fx.Node, position: int) -> bool:
        """Whether anything reads the storage of `node` after `position`."""
        renewed = self._last_renewed_read.get(self._find(node), -1)
        return renewed > position or self.old_read_after(node, position)

    def old_read_after(self, node: fx.Node, position: int) -> bool:
        """Whether anything reads what is in the storage of `node` now after `position`.

        Who reads what a later `copy_` puts there does not.
        """
        root = self._find(node)
        reads = self._last_renewed_read if node in self._renewed else self._last_read
        return max(reads.get(root, -1), self._last_read.get(root, -1)) > position

    def leaves_the_graph(self, node: fx.Node) -> bool:
        """Whether the storage of `node` is returned, or is a constant of the module."""
        return self._find(node) in self._fixed

    def input_of(self, node: fx.Node) -> fx.Node | None:
        """The placeholder whose storage `node` may share."""
        return self._inputs.get(self._find(node))
