"""Values that cross from one graph of a stage to a later one."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt.graph_utils import is_random
from graphopt.ir.bits import same_bits
from graphopt.ir.metadata import known_value
from graphopt.ir.views import is_pure_view

Names = dict[fx.Node, str]


@dataclass(frozen=True)
class CrossingValues:
    """The values that one graph of a stage computes and a later one needs.

    Attributes:
        slots: each value, as the later graph reads it, with its position among the kept values.
        kept: the nodes that the earlier graph returns for these values.
    """

    slots: dict[fx.Node, int]
    kept: list[fx.Node]


def closure(roots: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes `roots` and everything that they need, up to nodes in `stop`."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found and node not in stop:
            found.add(node)
            pending += node.all_input_nodes
    return found


def find_crossing(
    roots: Iterable[fx.Node], early: Collection[fx.Node], slots: Collection[fx.Node] = ()
) -> Iterator[fx.Node]:
    """The values computed in `early` that `roots` need; views are made again instead.

    Args:
        slots: the values that are kept already.
    """
    pending, seen = list(roots), set(slots)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in early and not _is_free(node):
            yield node
        else:
            pending += reversed(node.all_input_nodes)


def with_items(nodes: set[fx.Node]) -> Iterator[fx.Node]:
    """The given nodes, with the `getitem` nodes of each that has several results."""
    yield from nodes
    for node in nodes:
        if isinstance(known_value(node), (list, tuple)):
            yield from (user for user in node.users if user.target is operator.getitem)


def _is_free(node: fx.Node) -> bool:
    """True if a value costs nothing to compute again: views, and constants of the module."""
    return node.op == "get_attr" or is_pure_view(node)


class ValueNames:
    """Names by which the same value is found in two captures of one function. Names given by
    different objects of this class mean nothing to each other."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}
        self._constants: list[Any] = []

    def of(self, module: nn.Module, graph: fx.Graph, nodes: Collection[fx.Node]) -> Names:
        """A name for each placeholder and constant, and for each of `nodes`.

        Args:
            module: holds the constants.
        """
        names: Names = {}
        draws = 0
        for position, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                names[node] = f"%input{position}"
            elif node.op == "get_attr":
                names[node] = self._constant(operator.attrgetter(node.target)(module))
            elif node in nodes:
                arguments = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
                draws += is_random(node)
                text = f"{node.target}{arguments}{draws if is_random(node) else ''}"
                names[node] = self._numbers.setdefault(text, f"%{len(self._numbers)}")
        return names

    def _constant(self, value: Any) -> str:
        for index, known in enumerate(self._constants):
            if _is_same(value, known):
                return f"%constant{index}"
        self._constants.append(value)
        return f"%constant{len(self._constants) - 1}"


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return value.stride() == other.stride() and same_bits(value, other)
