"""Nodes whose result does not depend on the order of a tensor's elements, such as a norm.

    wait = wait_tensor(all_reduce)            wait = wait_tensor(all_reduce)
    part = split_with_sizes(wait, …)[0]
    whole = t(view(part, [4, 8]))       ──>
    norm = linalg_vector_norm(whole)          norm = linalg_vector_norm(wait)

A norm depends on the elements of `whole`, and not on how they are arranged. So it depends on
`part`, which a pass may read in place of `whole`, within a bucket for instance. The views that only
arrange elements are followed for such readers alone: a matrix product depends on a transposition.
"""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir.families import SAME_ELEMENTS
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import is_operator, is_pointwise
from graphopt.verify.dependency.segments import size_of

_REDUCTIONS = tuple(
    f"aten::{name}"
    for name in ("linalg_vector_norm", "norm", "sum", "mean", "prod", "amax", "amin", "max", "min")
)
_REDUCTIONS_OF_LISTS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")

_ARRANGE = (*(SAME_ELEMENTS - {"aten::_to_copy"}), "aten::t", "aten::transpose", "aten::permute")


class AnyOrder:
    """The nodes of a graph that read a tensor's elements without regard to their order.

    A reduction to one number does, and so does what is computed element by element, or put side by
    side, for such reductions alone: the squares of a sum of squares.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if _reduces_all(node) or (_keeps_elements(node) and self._is_read_in_any_order(node)):
                self._nodes.add(node)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._nodes

    def read_by(self, reader: fx.Node, source: fx.Node) -> fx.Node:
        """Returns the node to treat as the source when `reader` reads `source`: the value before a
        reordering, if order is irrelevant."""
        if reader in self._nodes:
            while _only_arranges(source):
                source = source.all_input_nodes[0]
        return source

    def _is_read_in_any_order(self, node: fx.Node) -> bool:
        """True if every reader of a node, through views or directly, ignores the order of its
        elements."""
        return bool(node.users) and all(
            user in self._nodes or (_only_arranges(user) and self._is_read_in_any_order(user))
            for user in node.users
        )


def _reduces_all(node: fx.Node) -> bool:
    """True if a node reduces all elements of a tensor, or of each tensor of a list, to one
    number."""
    if is_operator(node.target, *_REDUCTIONS_OF_LISTS):
        return True
    value = known_value(node)
    return is_operator(node.target, *_REDUCTIONS) and size_of(value) == 1


def _keeps_elements(node: fx.Node) -> bool:
    """True if a node is a `cat`, or elementwise with one operand that is more than a single
    number."""
    if is_operator(node.target, "aten::cat"):
        return True
    if not is_pointwise(node.target):
        return False
    large = [source for source in node.all_input_nodes if size_of(known_value(source)) != 1]
    return len(large) == 1 and size_of(known_value(large[0])) == size_of(known_value(node))


def _only_arranges(node: fx.Node) -> bool:
    """True if a node has exactly the elements of its input, in any order and shape."""
    if not is_operator(node.target, *_ARRANGE):
        return False
    value, source = known_value(node), known_value(node.all_input_nodes[0])
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return value.dtype == source.dtype and size_of(value) is not None
