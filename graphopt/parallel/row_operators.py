"""Operators that a rank may compute with its rows of their operands alone."""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_copy, is_list_operator, is_pointwise
from graphopt.ir.metadata import is_state, known_value
from graphopt.ir.operators import operator_of
from graphopt.ir.rows import RowShards

aten = torch.ops.aten

_REDUCING_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
"""List operators whose entries are no elementwise computations."""

_KEEP_ELEMENTS = frozenset({aten.clone.default, aten._to_copy.default, aten.alias.default})


def written_elementwise(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes from which elementwise operators compute values written to placeholders."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_copy(node):
            found.update(source for source in node.all_input_nodes[1:] if _acts_on_rows(source))
        elif node in found:
            found.update(filter(_acts_on_rows, node.all_input_nodes))
    return found


def _acts_on_rows(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if is_list_operator(node):
        return not is_reducing(node)
    return is_elementwise(node)


def is_elementwise(node: fx.Node) -> bool:
    """True if each result element is computed from one element of each operand."""
    if operator_of(node).random:
        return False
    like = operator_of(node).metadata_only
    return is_pointwise(node.target) or node.target in _KEEP_ELEMENTS or like


def is_reducing(node: fx.Node) -> bool:
    """True if each entry of a list operator makes one number of a tensor."""
    name = _compat.operator_name(node.target).removeprefix("aten::")
    return name in _REDUCING_LISTS


def has_shape_of(node: fx.Node, shards: RowShards) -> bool:
    """True if a value has the whole shape of a sharded value."""
    value = known_value(node)
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shards.shape


def goes_along(node: fx.Node, shards: RowShards) -> bool:
    """True if each rank may compute with its rows of a value: a number, or equal on all ranks. A
    tensor among the arguments of the step need not be that."""
    own = node.op == "placeholder" and not is_state(node)
    return _is_number(node) or (has_shape_of(node, shards) and not own)


def _is_number(node: fx.Node) -> bool:
    """True if a value is one number for all elements."""
    value = known_value(node)
    return not isinstance(value, torch.Tensor) or tuple(value.shape) in ((), (1,))
