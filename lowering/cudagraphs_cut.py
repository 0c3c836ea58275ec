"""Replace the pieces of a graph by calls of modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from graphopt.graph_utils import is_wait
from graphopt.ir.outlining import Copies, Part, describe_call, give_items, leaving, splice
from graphopt.ir.views import is_pure_view, is_update
from graphopt.lowering.boxed import box_calls
from graphopt.lowering.cudagraphs_pieces import Piece


class PieceBody(Part):
    """A piece as a graph of its own, which takes the piece's inputs in their order.

    Attributes:
        piece: what it is made from.
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.nodes, _inside)
        self.piece = piece
        for node in piece.inputs:
            self.take(node)
        self.fill(without=is_pure_view)
        self.returning(leaving(piece.nodes))

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """As a module. It shares submodules with `gm`, from which the piece is cut."""
        return box_calls(fx.GraphModule(gm, self.graph))


def _inside(body: Part, copies: Copies, node: fx.Node) -> fx.Node:
    """What a node is in a piece: an update before it began, or a view, made where it is needed."""
    if not is_pure_view(node) and is_update(node):
        updated: fx.Node = copies(node.all_input_nodes[0])
        return updated
    assert is_pure_view(node), f"%{node.name} is no input of its piece"
    return copies.copy(node)


def with_calls(
    source: fx.Graph, bodies: list[PieceBody], name_of: Callable[[PieceBody], str]
) -> fx.Graph:
    """A graph in which each piece is one call.

    Args:
        name_of: the name of the submodule that runs a piece.
    """

    def call(copies: Copies, body: Part) -> None:
        assert isinstance(body, PieceBody)
        called = copies.graph.call_module(name_of(body), tuple(map(copies, body.inputs)))
        # Running code marks where a late group begins to update state.
        describe_call(called, body, body.piece.written)
        give_items(copies, body, called)
        inside = set(body.nodes)
        for node in body.nodes:  # here, so that views stand in the late group of their piece
            if any(user not in inside for user in node.users):
                copies(node)

    members = {node for body in bodies for node in body.nodes}
    graph = splice(source, source.nodes, bodies, call, partial(_outside, members))
    for node in reversed(graph.nodes):
        if not node.users and is_pure_view(node):
            graph.erase_node(node)
    return graph


def _outside(members: set[fx.Node], copies: Copies, node: fx.Node) -> Any:
    """A node outside of the pieces, or of one that does not return it."""
    if node in members and (is_update(node) or is_wait(node)):
        return copies(node.all_input_nodes[0])
    assert node not in members or is_pure_view(node), f"%{node.name} is not returned by its piece"
    return copies.copy(node)
