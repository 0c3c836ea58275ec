"""Accumulation of a parameter's gradient over microbatches, found in a captured stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from graphopt.errors import GraphOptError
from graphopt.graph_utils import call_function_with_meta, is_operator, is_random, same_kind
from graphopt.ir.metadata import fake_value, input_name, phase_of

aten = torch.ops.aten


class GradientUpdate(Enum):
    """The way in which a backward leaves parameters' gradients: set, added to, or averaged."""

    SET = "set"
    ADD = "add"
    AVERAGE = "average"


@dataclass(frozen=True)
class Accumulation:
    """The nodes that accumulate one parameter's gradient over microbatches.

    Attributes:
        index: the parameter's index among those with a gradient input.
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
    """Finds how a graph accumulates one gradient, and inserts the other microbatches' updates.

    Args:
        index: the index of the gradient.
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
    """The addition to a gradient and the hooks on the sum, in graph order. A hook may read the
    sum as often as it likes."""
    readers = _backward_readers(gradient)
    adds = len(readers) == 1 and is_operator(readers[0].target, "aten::add")
    if not adds or readers[0].args[0] is not gradient:
        raise GraphOptError(
            f"{input_name(gradient)} is not added up as autograd does it, so that the backwards of"
            " single microbatches cannot be told apart\n"
            "  hint:  leave out the pass that changes additions to gradients"
        )
    found = _reachable(readers[0], _backward_readers)
    left = [node for node in found if any(user not in found for user in node.users)]
    if len(left) != 1 or any(map(is_random, found)):
        what = "draws random numbers" if len(left) == 1 else f"leaves {len(left)} values"
        raise GraphOptError(
            f"a hook on {input_name(gradient)} {what}, so that the backwards of single microbatches"
            " cannot be told apart\n"
            "  hint:  change the gradient after the step of the schedule"
        )
    return sorted(_reachable(left[0], lambda node: found.intersection(node.all_input_nodes)))


def _reachable(start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """All nodes that are reached from `start` by `following`, itself included."""
    found, pending = {start}, [start]
    while pending:
        new = {node for node in following(pending.pop()) if node not in found}
        found |= new
        pending += new
    return found


def _backward_readers(node: fx.Node) -> list[fx.Node]:
    return [
        user
        for user in node.users
        if phase_of(user) == "backward" and not is_operator(user.target, "aten::copy_")
    ]


def _first(graph: fx.Graph, gradient: fx.Node, added: list[fx.Node]) -> fx.Node:
    """The gradient of the first microbatch, to which nothing is added."""
    start, new = added[0], added[0].args[1]
    assert isinstance(new, fx.Node)
    with graph.inserting_before(added[-1].next):
        copies = {start: _own(graph, new, gradient, start)}
        for further in added[1:]:
            copies[further] = graph.node_copy(further, lambda node: copies.get(node, node))
    return copies[added[-1]]


def _own(graph: fx.Graph, new: fx.Node, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """A copy of `new` in storage of its own, laid out in memory as `gradient` is."""
    if same_kind(new, gradient):
        return call_function_with_meta(graph, aten.clone.default, (new,), like=like)
    value = fake_value(gradient)
    layout = (new, list(value.shape), list(value.stride()))
    empty = call_function_with_meta(graph, aten.new_empty_strided.default, layout, like=like)
    return call_function_with_meta(graph, aten.copy.default, (empty, new), like=like)
