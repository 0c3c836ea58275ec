"""Outlining: moves nodes of a graph into a graph of their own, called in their place.

    x ── a ── b ── c ── d            x ── call ── item ── d

                                     the part:  x ── a ── b ── c ── [c]

A value that can be made anywhere (a view, a constant) is made again on the other side of a part's
boundary instead of being passed through it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import OF_CALL, known_value, set_value, set_written_arguments, some_of
from graphopt.ir.views import inner_bases


class NodeCopies:
    """Copies of nodes in another graph, made on demand.

    Args:
        graph: the other graph.
        make: gives what a node is there.
    """

    def __init__(self, graph: fx.Graph, make: Callable[[NodeCopies, fx.Node], Any]) -> None:
        self.graph, self._make = graph, make
        self._made: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        if node not in self._made:
            self._made[node] = self._make(self, node)
        return self._made[node]

    def __setitem__(self, node: fx.Node, made: Any) -> None:
        self._made[node] = made

    def copy(self, node: fx.Node) -> fx.Node:
        """Returns the copy of a node, and copies its inputs first."""
        return self.graph.node_copy(node, self)


class OutlinedPart:
    """Outlined nodes, as a graph of their own.

    Args:
        nodes: in the order in which they run; inputs and outputs of the graph are none of them.
        make: gives what a node is in this part where it is none of `nodes`: one of its inputs
            (`take`), or a copy.

    Attributes:
        inputs: nodes of the graph that the part is cut from, whose values it takes.
        outputs: nodes of that graph whose values it returns.
        graph: of its own.
    """

    def __init__(
        self, nodes: Collection[fx.Node], make: Callable[[OutlinedPart, NodeCopies, fx.Node], Any]
    ) -> None:
        self.nodes = list(nodes)
        self.inputs: list[fx.Node] = []
        self.outputs: list[fx.Node] = []
        self.graph = fx.Graph()
        self._last_input: fx.Node | None = None
        self._copies = NodeCopies(self.graph, lambda copies, node: make(self, copies, node))

    def take(self, node: fx.Node, name: str = "") -> fx.Node:
        """Adds an input.

        Args:
            name: of its placeholder; that of the node, where none is given.
        """
        last = self._last_input
        place = self.graph.inserting_before() if last is None else self.graph.inserting_after(last)
        with place:
            taken = self.graph.placeholder(name or node.name)
        taken.meta = dict(node.meta)
        self._copies[node] = self._last_input = taken
        self.inputs.append(node)
        return taken

    def fill(self, without: Callable[[fx.Node], bool] = lambda node: False) -> None:
        """Copies the outlined nodes.

        Args:
            without: tells which are left out until one that needs them is copied.
        """
        for node in self.nodes:
            if not without(node):
                self._copies[node] = self._copies.copy(node)

    def returning(self, outputs: Iterable[fx.Node]) -> None:
        """Ends the part with a list of these nodes' values."""
        self.outputs = list(dict.fromkeys(outputs))
        self.graph.output([self._copies(node) for node in self.outputs])

    def end(self, results: Any) -> None:
        """Ends the part with a nest of nodes."""
        self.graph.output(fx.node.map_arg(results, self._copies))


def leaving(
    nodes: Collection[fx.Node], counts: Callable[[fx.Node], bool] = lambda user: True
) -> Iterator[fx.Node]:
    """Yields the nodes among `nodes` whose values, or views of them, are used outside.

    Args:
        counts: whether a user outside needs the value.
    """
    inside = set(nodes)
    for node in nodes:
        if any(user not in inside and counts(user) for user in node.users):
            yield from inner_bases(node, inside)


def splice(
    source: fx.Graph,
    nodes: Iterable[fx.Node],
    parts: Iterable[OutlinedPart],
    call: Callable[[NodeCopies, OutlinedPart], None],
    make: Callable[[NodeCopies, fx.Node], Any],
) -> fx.Graph:
    """Builds a graph in which each part is one call, at the place of its last node.

    Args:
        nodes: those of `source`, in the order in which they are to run.
        call: inserts the call of a part, and says what its outputs are now (`give_items`).
        make: what another node is, or one of a part that the part does not return.
    """
    graph = fx.Graph()
    _compat.copy_codegen(source, graph)
    copies = NodeCopies(graph, make)
    parts = list(parts)
    ends = {part.nodes[-1]: part for part in parts}
    members = {node for part in parts for node in part.nodes}
    for node in nodes:
        if node in ends:
            call(copies, ends[node])
        elif node not in members:
            copies(node)
    return graph


def give_items(copies: NodeCopies, part: OutlinedPart, call: fx.Node) -> None:
    """Makes the part's outputs the items of the call's result."""
    for index, output in enumerate(part.outputs):
        item = copies.graph.call_function(operator.getitem, (call, index))
        item.meta = dict(output.meta)
        copies[output] = item


def describe_call(call: fx.Node, part: OutlinedPart, written: Collection[fx.Node]) -> None:
    """Sets the metadata of a part's call: its first node's, and the inputs that it writes."""
    call.meta = some_of(part.nodes[0], *OF_CALL)
    set_value(call, tuple(map(known_value, part.outputs)))
    set_written_arguments(call, [i for i, node in enumerate(part.inputs) if node in written])
