"""Replace the pieces of a graph by calls of modules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_wait
from graphopt.ir.views import inner_bases, is_pure_view, is_update
from graphopt.iter_graph.running import GROUP
from graphopt.lowering.boxed import box_calls
from graphopt.lowering.cudagraphs_pieces import Piece


@dataclass
class PieceBody:
    """A piece as a graph of its own.

    Attributes:
        piece: what it is made from.
        outputs: nodes of the piece whose values it returns, as a list.
        graph: takes the piece's inputs, in their order.
    """

    piece: Piece
    outputs: list[fx.Node] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph)

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """As a module. It shares submodules with `gm`, from which the piece is cut."""
        return box_calls(fx.GraphModule(gm, self.graph))


def body_of(piece: Piece) -> PieceBody:
    """Cut out a piece. The graph that it is cut from stays as it is."""
    body = PieceBody(piece)
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.inputs:
        copies[node] = body.graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def value(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if not is_pure_view(node) and is_update(node) and node not in inside:
            return value(node.all_input_nodes[0])  # updated before the piece began
        assert is_pure_view(node), f"%{node.name} is no input of its piece"
        copies[node] = body.graph.node_copy(node, value)
        return copies[node]

    inside = set(piece.nodes)
    for node in piece.nodes:
        if not is_pure_view(node):
            copies[node] = body.graph.node_copy(node, value)
    returned = (
        base
        for node in piece.nodes
        if any(user not in inside for user in node.users)
        for base in inner_bases(node, inside)
    )
    body.outputs = list(dict.fromkeys(returned))
    body.graph.output([copies[node] for node in body.outputs])
    return body


def splice(
    source: fx.Graph, bodies: list[PieceBody], name_of: Callable[[PieceBody], str]
) -> fx.Graph:
    """A graph in which each piece is one call.

    Args:
        name_of: the name of the submodule that runs a piece.
    """
    graph = fx.Graph()
    _compat.copy_codegen(source, graph)
    outer: dict[fx.Node, Any] = {}
    ends = {body.piece.nodes[-1]: body for body in bodies}
    member = {node for body in bodies for node in body.piece.nodes}

    def value(node: fx.Node) -> Any:
        if node not in outer:
            outer[node] = _derived(graph, node, value)
        return outer[node]

    for node in source.nodes:
        if node not in member:
            outer[node] = graph.node_copy(node, value)
        elif node in ends:
            body = ends[node]
            _call(graph, body, name_of(body), value, outer)
    _drop_dead_views(graph)
    return graph


def _call(
    graph: fx.Graph,
    body: PieceBody,
    name: str,
    value: Callable[[fx.Node], Any],
    outer: dict[fx.Node, Any],
) -> None:
    piece = body.piece
    call = graph.call_module(name, tuple(map(value, piece.inputs)))
    first = piece.nodes[0].meta
    call.meta = {key: first[key] for key in ("phase", "source", GROUP) if key in first}
    call.meta["val"] = tuple(output.meta.get("val") for output in body.outputs)
    # Running code marks where a late group begins to update state.
    call.meta["writes"] = [i for i, source in enumerate(piece.inputs) if source in piece.written]
    for index, output in enumerate(body.outputs):
        outer[output] = graph.call_function(operator.getitem, (call, index))
        outer[output].meta = dict(output.meta)
    inside = set(piece.nodes)
    for node in piece.nodes:  # here, so that views stand in the late group of their piece
        if any(user not in inside for user in node.users):
            value(node)


def _derived(graph: fx.Graph, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """The value of a node of a piece that the piece does not return."""
    if is_update(node) or is_wait(node):
        return value(node.all_input_nodes[0])
    assert is_pure_view(node), f"%{node.name} is not returned by its piece"
    return graph.node_copy(node, value)


def _drop_dead_views(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and is_pure_view(node):
            graph.erase_node(node)
