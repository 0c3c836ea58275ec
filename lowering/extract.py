"""Replace the regions of a marked graph by calls of submodules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import (
    follows_output_convention,
    get_outputs,
    may_alias,
    set_outputs,
    tensors_in,
    written,
)
from graphopt.ir.operators import is_fused_optimizer, is_item
from graphopt.ir.views import inner_bases
from graphopt.lowering.compiler import kind_of
from graphopt.lowering.lowerable import as_factory, reads_metadata_only
from graphopt.lowering.regions import MARK, Mark, mark_regions


@dataclass
class Body:
    """One region as a graph of its own.

    Attributes:
        graph: takes the inputs, returns a list of tensors that share no storage, neither with each
            other nor with inputs.
        inputs: the values outside that it takes, as nodes of the graph it is cut from.
        outputs: the nodes it returns, of that graph.
        nodes: its nodes of that graph, in their order.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

    def text(self) -> str:
        """The same for two regions that compute the same of inputs of the same kind."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        lines = []
        for node, index in number.items():
            if node.op == "placeholder":
                what = str(kind_of(node.meta["val"]))
            else:
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
                kinds = [kind_of(tensor) for tensor in tensors_in(node.meta.get("val"))]
                what = f"{node.target}{arguments} -> {kinds}"
            lines.append(f"%{index} = {node.op} {what}")
        return "\n".join(lines)


class Cut:
    """A marked graph, cut into its regions and what stays. The graph itself stays as it is.

    Attributes:
        ordered: all nodes, in an order in which each region stands in one piece.
        bodies: the regions, in that order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._source = graph
        self._marks = _marks(graph)
        self.ordered = sorted(graph.nodes, key=lambda node: self._marks[node][:2])
        self.bodies: dict[int, Body] = {}
        for node in self.ordered:
            if self._marks[node].region >= 0:
                self.bodies.setdefault(self._marks[node].region, Body()).nodes.append(node)
        for body in self.bodies.values():
            _Cutter(body, self._marks).run()

    def splice(self, calls: Callable[[fx.Graph, Body, list[fx.Node]], fx.Node]) -> fx.Graph:
        """The graph in which each region is one call.

        Args:
            calls: inserts the call of a region, given the new graph, the region and its inputs;
                returns the node.
        """
        graph = fx.Graph()
        _compat.copy_codegen(self._source, graph)
        outer: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node not in outer:
                outer[node] = self._outside(graph, node, value)
            return outer[node]

        done: set[int] = set()
        for node in self.ordered:
            mark = self._marks[node]
            if mark.free or mark.region in done:
                continue
            if mark.region < 0:
                outer[node] = _unmarked(_copied(graph, node, value))
                continue
            done.add(mark.region)
            body = self.bodies[mark.region]
            call = calls(graph, body, [value(node) for node in body.inputs])
            for index, returned in enumerate(body.outputs):
                item = outer[returned] = graph.call_function(operator.getitem, (call, index))
                item.meta = {k: v for k, v in returned.meta.items() if k != MARK}
        self._forget_updates(graph)
        return graph

    def _forget_updates(self, graph: fx.Graph) -> None:
        """Let the output list the updates that are left: those in regions happen in place."""
        if not follows_output_convention(graph):
            return
        outputs = get_outputs(graph)
        updates = [node for node in outputs.updates if node.op != "placeholder"]
        set_outputs(graph, outputs._replace(updates=updates))

    def _outside(self, graph: fx.Graph, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        """A node of a region, or a free one, that is needed outside and is not returned."""
        mark = self._marks[node]
        assert mark.free or mark.region >= 0, "what stays is computed once"
        if mark.region >= 0 and written(node):
            return value(written(node)[0])
        if isinstance(node.meta["val"], (list, tuple)) and not may_alias(node):
            items = {user.args[1]: user for user in node.users if is_item(user)}
            return [value(items[index]) for index in range(len(node.meta["val"]))]
        return _unmarked(_copied(graph, node, value))


def _copied(graph: fx.Graph, node: fx.Node, value: Callable[[fx.Node], Any]) -> fx.Node:
    """A copy of `node` in `graph`; without its argument if it reads the metadata of that alone."""
    if not reads_metadata_only(node):
        return graph.node_copy(node, value)
    call = as_factory(node)
    assert call is not None
    copy = graph.call_function(*call)
    copy.meta = dict(node.meta)
    return copy


def _unmarked(node: fx.Node) -> fx.Node:
    node.meta.pop(MARK, None)
    return node


def _marks(graph: fx.Graph) -> dict[fx.Node, Mark]:
    """Marks of all nodes. A node that came after the graph was marked stays outside."""
    marks: dict[fx.Node, Mark] = {}
    for node in graph.nodes:
        mark = node.meta.get(MARK)
        if node.op in ("placeholder", "get_attr"):
            mark = Mark(-1)
        elif node.op == "output":
            mark = Mark(max((mark.level for mark in marks.values()), default=-1) + 1)
        elif mark is None:
            sources = [marks[source] for source in node.all_input_nodes]
            mark = Mark(max((m.level + (m.region >= 0) for m in sources), default=0))
        marks[node] = mark
    return marks


class _Cutter:
    """Fills in the graph of one region."""

    def __init__(self, body: Body, marks: dict[fx.Node, Mark]) -> None:
        self._body, self._marks = body, marks
        self._inside: dict[fx.Node, fx.Node] = {}
        self._taken: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        body = self._body
        first = body.graph.call_function(operator.add, (0, 0))  # inputs go before it
        self._first = first
        members = set(body.nodes)
        for node in body.nodes:
            self._inside[node] = body.graph.node_copy(node, self._value)
        body.graph.erase_node(first)
        body.outputs = list(dict.fromkeys(_returned(body.nodes, members)))
        body.graph.output([self._inside[node] for node in body.outputs])

    def _value(self, node: fx.Node) -> fx.Node:
        if node in self._inside:
            return self._inside[node]
        if not self._marks[node].free:
            return self._input(node)
        self._inside[node] = _copied(self._body.graph, node, self._value)
        return self._inside[node]

    def _input(self, node: fx.Node) -> fx.Node:
        if node not in self._taken:
            with self._body.graph.inserting_before(self._first):
                taken = self._body.graph.placeholder(node.name)
            taken.meta["val"] = node.meta["val"]
            self._taken[node] = taken
            self._body.inputs.append(node)
        return self._taken[node]


def _returned(nodes: list[fx.Node], members: set[fx.Node]) -> Iterator[fx.Node]:
    """What a region has to return: values used outside, or what those are views of."""
    for node in nodes:
        if any(_is_outside(user, members) for user in node.users):
            for base in inner_bases(node, members):
                yield from _tensors_of(base)


def _tensors_of(node: fx.Node) -> Iterator[fx.Node]:
    """The node, or its items where it has several results."""
    if isinstance(node.meta["val"], (list, tuple)):
        yield from (user for user in node.users if is_item(user))
    else:
        yield node


def _is_outside(user: fx.Node, members: set[fx.Node]) -> bool:
    return user not in members and not reads_metadata_only(user)


def region_graphs(gm: fx.GraphModule, min_ops: int = 10) -> list[fx.GraphModule]:
    """The regions of a graph, each as a graph of its own.

    Args:
        gm: left as it is, except for marks in the metadata of its nodes.

    Returns:
        Graphs that take tensors described by ``meta["val"]`` and return a list of tensors.
    """
    mark_regions(gm.graph, node_predicate=lambda n: not is_fused_optimizer(n), min_ops=min_ops)
    return [fx.GraphModule({}, body.graph) for body in Cut(gm.graph).bodies.values()]
