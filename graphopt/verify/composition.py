"""Composition of a graph's pieces, in the order in which they run, into one graph without calls.

    a = first(x)              t = relu(x)
    b = second(a, w)    →     b = mm(t, w)

The caller decides which piece is called with what, by the same data that the running program uses:
the graphs of the pieces, their arguments, and the values handed from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphopt.verify.checks.module_constants import attribute, same_object
from graphopt.verify.inlining import Values, inline


class NamedObjects:
    """Constants, modules and state that several graphs use, each under one name.

    Args:
        state: tensors may be updated, so that each is identified by itself; otherwise by its bits.
    """

    def __init__(self, *, state: bool = False) -> None:
        self.are_state = state
        self._names: dict[int, str] = {}
        self._known: dict[str, Any] = {}
        self._held: list[Any] = []  # they are known by their identity

    def learn(self, graph: fx.Graph, find: Callable[[fx.Node], Any]) -> None:
        """Registers the objects that a graph reads and calls under the names that it uses."""
        for node in graph.nodes:
            if node.op in ("get_attr", "call_module"):
                self.name_of(find(node), str(node.target))

    def name_of(self, value: Any, wanted: str) -> str:
        """Returns the name of an object, which is registered at its first use.

        Args:
            wanted: the name for an object that has none yet.
        """
        name = self._names.get(id(value))
        if name is not None:
            return name
        same = (name for name, known in self._known.items() if self._is_same(known, value))
        name = next(same, None) or self._free(wanted)
        self._known.setdefault(name, value)
        self._held.append(value)
        return self._names.setdefault(id(value), name)

    def find(self, node: fx.Node) -> Any:
        """Returns the object that a node of a composed graph names."""
        return self._known[str(node.target)]

    def _free(self, wanted: str) -> str:
        taken = wanted in self._known
        return f"{wanted}, number {len(self._known)}" if taken else wanted

    def _is_same(self, one: Any, other: Any) -> bool:
        if isinstance(one, fx.GraphModule) or not self.are_state:
            return same_object(one, other)
        return not isinstance(one, (torch.Tensor, nn.Module)) and same_object(one, other)


class ComposedGraph:
    """One graph composed of pieces, for reading only: it never runs.

    Args:
        objects: names of objects that pieces use; shared by compared graphs. State tensors become
            inputs.
        find: node -> the object that it names, if its own module does not have it.
        pieces: names of submodules whose calls are inlined.
        handing: functions that pass their first argument on to another piece.

    Attributes:
        graph: the graph composed so far.
    """

    def __init__(
        self,
        objects: NamedObjects,
        find: Callable[[fx.Node], Any] | None = None,
        *,
        pieces: Collection[str] = (),
        handing: Collection[Any] = (),
    ) -> None:
        self.graph = fx.Graph()
        self._objects, self._find = objects, find
        self._pieces, self._handing = pieces, handing
        self._inputs: dict[str, fx.Node] = {}

    def input(self, like: fx.Node, name: str | None = None) -> fx.Node:
        """Adds an input to the composed graph, named as in the piece if no other name is given.

        Args:
            like: a placeholder with the same kind of value.
        """
        target = str(like.target) if name is None else name
        node = self.graph.create_node("placeholder", target, like.args, name=like.name)
        node.meta = dict(like.meta)
        return node

    def inputs(self, graph: fx.Graph) -> list[fx.Node]:
        """Adds an input to the composed graph for each placeholder of a piece."""
        return [self.input(node) for node in graph.find_nodes(op="placeholder")]

    def call(self, piece: fx.GraphModule, arguments: Iterable[Any]) -> Any:
        """Appends the nodes of a piece, called with these arguments, and returns its results.

        Returns:
            What the piece returns, nested alike.
        """
        return inline(piece.graph, arguments, partial(self._appended, piece))

    def end(self, returned: Any) -> fx.Graph:
        """Adds the output and returns the graph, after all pieces were called."""
        self.graph.output(returned)
        return self.graph

    def _appended(self, piece: fx.GraphModule, node: fx.Node, values: Values) -> Any:
        if node.op == "call_module" and str(node.target) in self._pieces:
            called = piece.get_submodule(str(node.target))
            assert isinstance(called, fx.GraphModule)
            return self.call(called, fx.node.map_arg(node.args, values.__getitem__))
        if node.target in self._handing:
            return values[node.all_input_nodes[0]]
        if node.op not in ("get_attr", "call_module"):
            return self.graph.node_copy(node, values.__getitem__)
        value = attribute(piece, node)
        if value is None and self._find is not None:
            value = self._find(node)
        name = self._objects.name_of(value, str(node.target))
        if node.op == "get_attr" and self._objects.are_state and isinstance(value, torch.Tensor):
            if name not in self._inputs:
                self._inputs[name] = self.input(node, name)
            return self._inputs[name]
        copy = self.graph.node_copy(node, values.__getitem__)
        copy.target = name
        return copy
