"""Norms of sharded values: each rank's partial sum, and one all-reduce for all that are read
together.

    n1 = vector_norm(g1)             s1 = vector_norm(part of g1) ** 2
    n2 = vector_norm(g2)             s2 = vector_norm(part of g2) ** 2
    t  = stack([n1, n2])             n1, n2 = unbind(sqrt(all_reduce(stack([s1, s2]))))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import argument
from graphopt.ir.rows import RowShards
from graphopt.parallel.markers import Group, Nodes
from graphopt.parallel.shard_communication import Make, owned_part

aten, functional = torch.ops.aten, torch.ops._c10d_functional


class Norms:
    """The norms of sharded values in one graph, computed as partial norms and one all-reduce.

    Args:
        group: the ranks that have parts of them.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: dict[fx.Node, float] = {}
        self._whole: dict[fx.Node, fx.Node] = {}
        self._lists: dict[fx.Node, tuple[float, list[bool]]] = {}

    def is_norm(self, node: fx.Node) -> bool:
        """True if a node reduces all elements to one norm, by a sum of powers or a maximum."""
        if is_operator(node.target, "aten::linalg_vector_norm"):
            if argument(node, "dim") is not None or argument(node, "keepdim"):
                return False
        elif not is_operator(node.target, "aten::_foreach_norm"):
            return False
        return _known(argument(node, "ord"))

    def take(self, node: fx.Node, rows: dict[fx.Node, RowShards]) -> None:
        """Computes a norm of this rank's rows only; the rest follows when somebody reads it."""
        make = Nodes(node, "communication")

        def part(value: Any) -> Any:
            return owned_part(make, value, rows[value], self._group) if value in rows else value

        order = argument(node, "ord")
        if is_operator(node.target, "aten::_foreach_norm"):
            given: Any = node.args[0]
            self._lists[node] = order, [value in rows for value in given]
            node.args = ([part(value) for value in given], *node.args[1:])
        else:
            node.args = (part(node.args[0]), *node.args[1:])
            self._pending[node] = order

    def pick(self, node: fx.Node) -> bool:
        """Handles an item of a list of norms. Returns whether there is such a list."""
        source: Any = node.args[0]
        if source not in self._lists:
            return False
        order, partial = self._lists[source]
        if partial[node.args[1]]:  # type: ignore[index]
            self._pending[node] = order
        return True

    def settle_inputs(self, node: fx.Node) -> None:
        """Completes the norms that a node reads, together with all others pending by then."""
        if any(map(self._pending.__contains__, node.all_input_nodes)):
            self._complete(node)
        for source in node.all_input_nodes:
            if source in self._whole:
                node.replace_input_with(source, self._whole[source])

    def _complete(self, reader: fx.Node) -> None:
        pending, self._pending = self._pending, {}
        alike: dict[Any, list[fx.Node]] = {}
        for node, order in pending.items():
            value = fake_value(node)
            alike.setdefault((order, value.dtype, value.device), []).append(node)
        for (order, *_), nodes in alike.items():
            make = Nodes(reader, "communication")
            wholes = _completed(make, nodes, order, self._group)
            self._whole.update(zip(nodes, wholes, strict=True))


def _completed(make: Make, norms: list[fx.Node], order: float, group: Group) -> list[fx.Node]:
    """Combines the ranks' partial norms to norms of whole tensors."""
    stacked = make(aten.stack.default, norms)
    largest = math.isinf(order)
    if not largest and order != 1:
        stacked = make(aten.pow.Tensor_Scalar, stacked, order)
    how = "max" if largest else "sum"
    launched = make(functional.all_reduce.default, stacked, how, group.name)
    total = make(functional.wait_tensor.default, launched)
    if order == 2:
        total = make(aten.sqrt.default, total)
    elif not largest and order != 1:
        total = make(aten.pow.Tensor_Scalar, total, 1 / order)
    return [make(aten.select.int, total, 0, index) for index in range(len(norms))]


def _known(order: Any) -> bool:
    """True if norms of this order can be combined from partial norms of zero-padded rows."""
    return isinstance(order, (int, float)) and order >= 1
