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


def any_order_readers(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that read a tensor's elements without regard to their order: reductions to
    one number, and what is elementwise, or put side by side, for such reductions alone."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _reduces_all(node) or (_keeps_elements(node) and _is_read_within(node, found)):
            found.add(node)
    return found


def before_arrangement(node: fx.Node) -> fx.Node:
    """Returns the value whose elements a node has, in any order and shape."""
    while _only_arranges(node):
        node = node.all_input_nodes[0]
    return node


def _is_read_within(node: fx.Node, found: set[fx.Node]) -> bool:
    """True if every reader of a node, through views or directly, is among those found."""
    return bool(node.users) and all(
        user in found or (_only_arranges(user) and _is_read_within(user, found))
        for user in node.users
    )


def _reduces_all(node: fx.Node) -> bool:
    """True if a node reduces all elements of a tensor, or of each of a list, to one number."""
    if is_operator(node.target, *_REDUCTIONS_OF_LISTS):
        return True
    return is_operator(node.target, *_REDUCTIONS) and size_of(known_value(node)) == 1


def _keeps_elements(node: fx.Node) -> bool:
    """True if a node is a `cat`, or elementwise with one operand that is more than a single
    number."""
    if is_operator(node.target, "aten::cat"):
        return True
    if not is_pointwise(node.target):
        return False
    sizes = [size_of(known_value(source)) for source in node.all_input_nodes]
    return [size for size in sizes if size != 1] == [size_of(known_value(node))]


def _only_arranges(node: fx.Node) -> bool:
    """True if a node has exactly the elements of its input, in any order and shape."""
    if not is_operator(node.target, *_ARRANGE):
        return False
    value, source = known_value(node), known_value(node.all_input_nodes[0])
    size = size_of(value)
    return size is not None and size == size_of(source) and value.dtype == source.dtype
