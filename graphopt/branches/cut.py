"""Finds the nodes of a graph that still have to run if some values are already computed.

there: b                     x ─ a ─ b ─ view ─ c ─ result
left to run, from b:                     view ─ c ─ result
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.ir.effects import Effects
from graphopt.ir.metadata import carried_index, fake_value, known_value
from graphopt.ir.operators import draws, is_collective, written
from graphopt.ir.views import is_pure_view, may_be_view
from graphopt.verify.values.terms import TensorValue


def handed_out(nodes: Iterable[fx.Node], value_of: Mapping[fx.Node, Any]) -> dict[Any, fx.Node]:
    """Maps each value that a partly run graph can hand to another graph to its node.

    Not those that lie in storage of its inputs, which others write, or of its constants.
    """
    found: dict[Any, fx.Node] = {}
    effects: Effects | None = None
    for node in nodes:
        value = value_of.get(node)
        if not isinstance(value, TensorValue) or not _is_plain(node):
            continue
        effects = effects or Effects(node.graph)
        owner = effects.input_of(node)
        if node.op == "get_attr" or (owner is not None and carried_index(owner) is None):
            continue
        found.setdefault(value, node)
    return found


class GraphCut:
    """A graph divided into nodes that still have to run and nodes with known values.

    Args:
        roots: nodes that have to run.
        value_of: what each node computes.
        there: values that are there already, by what they are.
        drawn: nodes whose random numbers have been drawn.

    Attributes:
        left: the nodes that are left to run, inputs included.
        taken: nodes whose values are there, with what gives them.
    """

    def __init__(
        self,
        roots: Iterable[fx.Node],
        value_of: Mapping[fx.Node, Any],
        there: Mapping[Any, fx.Node],
        drawn: set[fx.Node],
    ) -> None:
        self._value_of, self._there, self._drawn = value_of, there, drawn
        self.left: set[fx.Node] = set()
        self.taken: dict[fx.Node, fx.Node] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node in self.left or node in self.taken:
                continue
            source = self._taken(node)
            if source is not None:
                self.taken[node] = source
                continue
            self.left.add(node)
            waiting += node.all_input_nodes

    def _taken(self, node: fx.Node) -> fx.Node | None:
        """The node that provides an already computed value, or None if it must be computed."""
        source = self._source(node)
        if source is None or not _is_view(node):
            return source
        base = node.all_input_nodes[0]
        # What is a view of an input is one in this call as well, and one value that is there may
        # have many views.
        return None if _root(base).op == "placeholder" or self._source(base) else source

    def _source(self, node: fx.Node) -> fx.Node | None:
        if (
            node.op != "call_function"
            or is_collective(node)
            or written(node)
            or not _is_plain(node)
        ):
            return None
        if draws(node) and node not in self._drawn:
            return None
        if not draws(node) and not node.all_input_nodes:  # a constant is made at no cost
            return None
        source = self._there.get(self._value_of.get(node))
        return source if source is not None and _alignment(source) == _alignment(node) else None


def _alignment(node: fx.Node) -> int:
    """The offset of a tensor within a 64-byte cache line, which affects some kernels' rounding."""
    value = fake_value(node)
    return int(value.storage_offset() * value.element_size() % 64)


def _is_view(node: fx.Node) -> bool:
    return is_pure_view(node) or may_be_view(node)


def _root(node: fx.Node) -> fx.Node:
    """The tensor behind a chain of views."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_plain(node: fx.Node) -> bool:
    """True if a tensor is strided and has no conjugate or negative bit."""
    value = known_value(node)
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_complex()
        and not value.is_neg()
    )


def in_order(graph: fx.Graph, nodes: set[fx.Node]) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node in nodes)
