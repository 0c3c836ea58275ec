"""How the gradient of a parameter is added up over microbatches, found in a captured stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from graphopt.errors import GraphOptError
from graphopt.graph_utils import call_function_with_meta, is_operator, same_kind

aten = torch.ops.aten


class Gradients(Enum):
    """What a backward does with the gradients of parameters."""

    SET = "set"
    ADD = "add"
    AVERAGE = "average"


@dataclass(frozen=True)
class Accumulation:
    """How the gradient of one parameter is left behind, as nodes.

    Attributes:
        index: of the parameter among those with a gradient input.
        first: the gradient of a first microbatch, in storage of its own.
        added, averaged: updates of the gradient by further microbatches, and by the last one.
    """

    index: int
    first: fx.Node
    added: fx.Node
    averaged: fx.Node


def find_accumulation(
    graph: fx.Graph, index: int, gradient: fx.Node, averaged: fx.Node
) -> Accumulation:
    """What a graph does with one gradient; inserts what other microbatches do.

    Args:
        index: of the gradient.
        gradient: its placeholder.
        averaged: its update.

    Raises:
        GraphOptError: the gradient is not added up as autograd does it.
    """
    added = _added(gradient)
    first = _first(graph, gradient, added)
    if averaged.args[1] is added[-1]:
        return Accumulation(index, first, averaged, averaged)
    with graph.inserting_after(added[-1]):
        update = call_function_with_meta(
            graph, aten.copy_.default, (gradient, added[-1]), like=added[-1]
        )
    return Accumulation(index, first, update, averaged)


def _added(gradient: fx.Node) -> list[fx.Node]:
    """The additions to a gradient and what hooks do to it, until it is averaged."""
    chain: list[fx.Node] = []
    following = _following(gradient)
    while len(following) == 1:
        chain += following
        following = _following(chain[-1])
    if not chain or not is_operator(chain[0].target, "aten::add") or chain[0].args[0] != gradient:
        raise GraphOptError(
            f"{gradient.meta['fqn']} is not added up as autograd does it, so that the backwards of"
            " single microbatches cannot be told apart\n"
            "  hint:  leave out the pass that changes additions to gradients"
        )
    return chain


def _following(node: fx.Node) -> list[fx.Node]:
    """Who reads `node` in the backward."""
    return [
        user
        for user in node.users
        if user.meta.get("phase") == "backward" and not is_operator(user.target, "aten::copy_")
    ]


def _first(graph: fx.Graph, gradient: fx.Node, added: list[fx.Node]) -> fx.Node:
    """What the gradient is when there was none before: nothing is added to it."""
    start, new = added[0], added[0].args[1]
    assert isinstance(new, fx.Node)
    with graph.inserting_before(added[-1].next):
        copies = {start: _own(graph, new, gradient, start)}
        for further in added[1:]:
            copies[further] = graph.node_copy(further, lambda node: copies.get(node, node))
    return copies[added[-1]]


def _own(graph: fx.Graph, new: fx.Node, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """A copy of `new`, laid out in memory as `gradient` is."""
    if same_kind(new, gradient):
        return call_function_with_meta(graph, aten.clone.default, (new,), like=like)
    value = gradient.meta["val"]
    layout = (new, list(value.shape), list(value.stride()))
    empty = call_function_with_meta(graph, aten.new_empty_strided.default, layout, like=like)
    return call_function_with_meta(graph, aten.copy.default, (empty, new), like=like)
