"""The operators and tensors that Inductor may compile, and why it may not compile others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_operator, is_random, is_wait, tensors_in
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, draws, fused_optimizer, operator_of
from graphopt.ir.views import is_pure_view
from graphopt.lowering.number_arguments import counts_steps, is_listed, takes_numbers
from graphopt.lowering.updates import reason_to_keep_update

aten = torch.ops.aten

_NAMESPACES = ("aten", "prims")

NodePredicate = Callable[[fx.Node], bool]

_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put")

_READS_STRIDES = ("aten::as_strided", "aten::as_strided_scatter")

_ADDED_IN_ORDER = (
    *("aten::col2im", "aten::embedding_dense_backward", "aten::index_add", "aten::index_reduce"),
    *("aten::put", "aten::unfold_backward"),
)
"""What ATen adds up in one order on the CPU, and code of Inductor in whichever its threads come."""

_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)


def reason_to_keep(node: fx.Node, *, random: bool = False) -> str | None:
    """Returns why a node cannot be compiled, or None if it can.

    Args:
        node: a call of a captured graph. Items of several results are not asked for: they go with
            the node that has the results.
        random: whether random numbers may be drawn by compiled code, which draws others.
    """
    target = node.target
    if node.op == "call_module":
        return "it is a module"
    if node.op != "call_function":
        return f"it is a {node.op} node"
    if not isinstance(target, _compat.OpOverload):
        return "it computes with Python numbers"
    if is_collective(node) or is_wait(node):
        return "it communicates"
    if target.namespace not in _NAMESPACES:
        return f"{target.namespace} is no namespace of Inductor's"
    if draws(node) and not random:
        return "it draws random numbers"
    if _compat.schema_of(target).is_mutable:
        return "it updates its argument"
    if fused_optimizer(target) is not None:
        return reason_to_keep_update(node)
    if _compat.operator_name(target) in _READS_STRIDES:
        return "it counts from the beginning of a storage"
    if _compat.operator_name(target).startswith("aten::_foreach_") and not is_listed(node):
        return "nothing says what it does to each tensor of its lists"
    if counts_steps(node):
        return "it counts steps, which are read as Python numbers"
    if _selects_by_values(node):
        return "how much it selects is known only when it runs"
    if _adds_in_no_order(node):
        return "several threads of compiled code would add in no fixed order"
    return _unsuitable_value(node)


def _selects_by_values(node: fx.Node) -> bool:
    """True if the number of a node's results depends on values. A number that the graph assumes
    would be checked again by Inductor."""
    target: Any = node.target
    if takes_indices(node):
        return has_mask(node)
    return torch.Tag.dynamic_output_shape in target.tags


def takes_indices(node: fx.Node) -> bool:
    """True if a node takes a list of indices, each of which may be a mask."""
    return is_operator(node.target, *_INDEXING)


def has_mask(node: fx.Node) -> bool:
    """True if an index of a node is a mask, so that its values decide the size of the result."""
    indices: Any = argument(node, "indices")
    values = [known_value(index) for index in indices if isinstance(index, fx.Node)]
    return any(value.dtype in (torch.bool, torch.uint8) for value in tensors_in(values))


def _adds_in_no_order(node: fx.Node) -> bool:
    value = known_value(node)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if is_operator(node.target, *_ADDED_IN_ORDER):
        return True
    if not is_operator(node.target, "aten::index_put", "aten::_unsafe_index_put"):
        return False
    return bool(argument(node, "accumulate"))


def _unsuitable_value(node: fx.Node) -> str | None:
    results = list(tensors_in(known_value(node)))
    if not results:
        return "no meta kernel says what it returns, or it returns no tensor"
    values = [known_value(source) for source in node.all_input_nodes]
    numbers = [value for value in values if isinstance(value, _NUMBERS)]
    if numbers and not (
        takes_numbers(node) and all(isinstance(v, torch.SymFloat) for v in numbers)
    ):
        return "it takes a number that is computed in the graph"
    for tensor in (*results, *tensors_in(values)):
        reason = unsuitable_tensor(tensor)
        if reason is not None:
            return reason
    return None


def unsuitable_tensor(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor cannot go through compiled code, or None if it can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "a tensor is quantized"
    if tensor.is_neg():
        return "a tensor has its negative bit set"
    if tensor.is_complex():
        return "a tensor is complex"
    if _compat.has_symbolic_shape(tensor):
        return "a shape is known only when it runs"
    return None


def reads_metadata_only(node: fx.Node) -> bool:
    """True if a node reads only shape, dtype and device of its tensor arguments."""
    return operator_of(node).metadata_only and as_factory(node) is not None


def is_free(node: fx.Node, stays: Callable[[fx.Node], bool]) -> bool:
    """True if a node costs nothing to compute again: constants, and views of values outside
    compiled code.

    Args:
        stays: tells whether a node before it is free or not lowerable.
    """
    if node.op != "call_function" or not isinstance(known_value(node), (torch.Tensor, list, tuple)):
        return False
    if reads_metadata_only(node):
        return True
    if _is_factory(node.target):
        return not is_random(node)
    if not is_pure_view(node):
        return False
    return all(map(stays, node.all_input_nodes))


def as_factory(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Returns the factory call equivalent to a `*_like` node, without its tensor argument.

    Returns:
        Target, args and kwargs; None where no single operator does.
    """
    value = known_value(node)
    if not isinstance(value, torch.Tensor) or unsuitable_tensor(value) is not None:
        return None
    sizes, options = list(value.shape), {"dtype": value.dtype, "device": value.device}
    if is_operator(node.target, "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"):
        return aten.empty_strided.default, (sizes, list(value.stride())), options
    if not value.is_contiguous():
        return None
    if is_operator(node.target, "aten::full_like", "aten::new_full"):
        fill = argument(node, "fill_value")
        if isinstance(fill, fx.Node):
            return None
        return aten.full.default, (sizes, fill), options
    ones = is_operator(node.target, "aten::ones_like", "aten::new_ones")
    return aten.full.default, (sizes, 1 if ones else 0), options


@cache
def _is_factory(target: Any) -> bool:
    if not isinstance(target, _compat.OpOverload) or target.namespace not in _NAMESPACES:
        return False
    schema = _compat.schema_of(target)
    names = [argument.name for argument in schema.arguments]
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return "pin_memory" in names and not takes_tensors and not schema.is_mutable
