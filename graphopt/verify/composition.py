"""Pieces of a graph, put together again as they run: one graph that calls nothing.

    a = first(x)              t = relu(x)
    b = second(a, w)    →     b = mm(t, w)

Who calls what with what is said by whoever puts the pieces together, from that alone which also
runs: the graphs of the pieces, their arguments, and what is handed from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.verify.inlining import call_of
from graphopt.verify.module_constants import attribute, same_object


class Composition:
    """One graph made of pieces. It is to be read, and not to be run.

    Args:
        whole: the graph as one, of which the constants are known by its names.

    Attributes:
        graph: what is put together so far.
    """

    def __init__(self, whole: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        nodes = whole.graph.find_nodes(op="get_attr")
        self._constants = {str(node.target): attribute(whole, node) for node in nodes}

    def input(self, like: fx.Node, name: str | None = None) -> fx.Node:
        """An input of the whole: one that it has, or by a name of its own, one that is arbitrary.

        Args:
            like: says what kind of value it is.
        """
        target = str(like.target) if name is None else name
        node = self.graph.create_node("placeholder", target, name=like.name)
        node.meta = dict(like.meta)
        return node

    def call(self, piece: fx.GraphModule, arguments: Iterable[Any]) -> Any:
        """Append what a piece does with some arguments.

        Returns:
            What the piece returns, nested alike.
        """
        values: dict[fx.Node, Any] = {}
        given = iter(arguments)
        for node in piece.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = self._appended(piece, node, values)
        return None

    def finish(self, results: Sequence[Any], updates: Sequence[Any], carried: Sequence[Any]) -> fx.Graph:
        """The graph, once all pieces are called."""
        self.graph.output((list(results), list(updates), list(carried)))
        return self.graph

    def _appended(self, piece: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        called = call_of(node)
        if called is not None and called[0] is not None:
            return self.call(called[0], fx.node.map_arg(called[1], values.__getitem__))
        source = values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if isinstance(source, (list, tuple)):  # an item of what a piece returns
            return source[node.args[1]]  # type: ignore[index]
        copy = self.graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            copy.target = self._name_of(attribute(piece, node), str(node.target))
        return copy

    def _name_of(self, value: Any, target: str) -> str:
        """The name of a constant in the whole; another one where the whole does not have it."""
        if target in self._constants and same_object(self._constants[target], value):
            return target
        for name, known in self._constants.items():
            if same_object(known, value):
                return name
        kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        name = f"{target} of a piece ({kind}, {id(value)})"
        self._constants[name] = value
        return name
