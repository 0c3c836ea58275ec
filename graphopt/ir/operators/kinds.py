"""Kinds of operators: collective, wait, view, random, and the like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.families import COMPLEX, FUSED_OPTIMIZERS, HALF
from graphopt.ir.operators.table import operator_of, row


def is_operator(target: object, *names: str) -> bool:
    """True if a node target is an overload of one of the operators, such as ``aten::copy_``.

    >>> from graphopt.graph_utils import find_nodes, is_operator
    >>> find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::sum", "aten::mean"))
    [sum_1, sum_2]
    """
    return isinstance(target, _compat.OpOverload) and _compat.operator_name(target) in names


def is_copy(node: fx.Node) -> bool:
    """True if a node replaces the whole value of its first argument by that of its second.

    >>> from graphopt.graph_utils import find_nodes, is_copy
    >>> [str(node.args[0]) for node in find_nodes(gm.graph, is_copy)][:2]
    ['optimizer_weight_step', 'optimizer_bias_step']
    """
    return operator_of(node).copies


def is_wait(node: fx.Node) -> bool:
    """True if a node waits for a functional collective.

    >>> from graphopt.graph_utils import find_nodes, is_wait
    >>> find_nodes(gm.graph, is_wait)
    [wait_tensor, wait_tensor_1]
    """
    return operator_of(node).wait


def is_collective(node: fx.Node) -> bool:
    """True if a node launches a functional collective.

    >>> from graphopt.graph_utils import find_nodes, is_collective
    >>> find_nodes(gm.graph, is_collective)
    [all_reduce, all_reduce_1]
    """
    return operator_of(node).collective


def is_marker(node: fx.Node) -> bool:
    """True if a node is a marker, which a kind of parallelism replaces by communication."""
    return operator_of(node).marker


def is_item(node: fx.Node) -> bool:
    """True if a node picks one of several results.

    >>> from graphopt.graph_utils import find_nodes, is_item
    >>> all(is_item(n) for n in gm.graph.nodes if n.name.startswith('getitem'))
    True
    """
    return operator_of(node).item


def is_pointwise(target: object) -> bool:
    """True if an operator computes each result element from one element of each operand.

    >>> from graphopt.graph_utils import is_pointwise
    >>> is_pointwise(torch.ops.aten.add.Tensor), is_pointwise(torch.ops.aten.mm.default)
    (True, False)
    """
    return row(target).pointwise


def rounds_in_place(target: object, dtype: torch.dtype) -> bool:
    """True if an in-place operator gives other bits than torch's functional form of it.

    >>> from graphopt.ir.operators import rounds_in_place
    >>> times = torch.ops.aten.mul_.Scalar
    >>> rounds_in_place(times, torch.bfloat16), rounds_in_place(times, torch.float32)
    (True, False)
    """
    kinds = row(target).rounds
    return (dtype.is_complex and COMPLEX in kinds) or (dtype in _HALVES and HALF in kinds)


def rounds_a_list_in_place(target: object, entries: Iterable[Any]) -> bool:
    """True if an in-place list operator gives other bits than its functional form for some entry,
    on CPUs.

    Args:
        entries: the tensors that it updates, or tensors like them.
    """
    if not row(target).listed or not row(target).rounds:
        return False
    tensors = (entry for entry in entries if isinstance(entry, torch.Tensor))
    return any(t.device.type == "cpu" and rounds_in_place(target, t.dtype) for t in tensors)


_HALVES = (torch.bfloat16, torch.float16)


def may_alias(node: fx.Node) -> bool:
    """True if the result, or an item of it, may share memory with an argument.

    >>> from graphopt.graph_utils import find_nodes, may_alias
    >>> find_nodes(gm.graph, may_alias)[0]
    t
    """
    return operator_of(node).may_alias


def is_list_operator(node: fx.Node) -> bool:
    """True if a node computes, in place or not, one thing for each entry of lists of tensors.

    >>> from graphopt.graph_utils import find_nodes, is_list_operator
    >>> find_nodes(gm.graph, is_list_operator)
    [_foreach_add, _fused_adam]
    """
    known = operator_of(node)
    return known.listed and not known.collective and not known.wait


def fused_optimizer(target: Any) -> str | None:
    """Returns the name of a fused optimizer, such as `_fused_adamw` for all its overloads, or
    None."""
    if not isinstance(target, _compat.OpOverload):
        return None
    name: str = _compat.operator_name(target).removeprefix("aten::").removesuffix("_")
    return name if name in FUSED_OPTIMIZERS else None


def fused_in_place(target: Any) -> Any:
    """Returns the in-place overload of a fused optimizer, which returns nothing."""
    packet = getattr(torch.ops.aten, f"{fused_optimizer(target)}_")
    return getattr(packet, _compat.overload_name(target))


def is_fused_optimizer(node: fx.Node) -> bool:
    """True if a node is a fused optimizer, in place or not."""
    return fused_optimizer(node.target) is not None


def updated_lists(name: str, grad_scale: object) -> tuple[int, ...]:
    """Returns the positions of the lists that a fused optimizer updates; gradients are among them
    if it unscales them with `grad_scale`."""
    lists = FUSED_OPTIMIZERS[name]
    return lists if grad_scale is None else (*lists[:1], 1, *lists[1:])


def is_random(node: fx.Node) -> bool:
    """True if a node may draw from a random number generator, or reads or writes its state.

    >>> from graphopt.graph_utils import find_nodes, is_random
    >>> dropout = torch.nn.Dropout(0.5)
    >>> graph = graphopt.capture(lambda m, x: m(x), dropout, torch.ones(3)).graph_module.graph
    >>> find_nodes(graph, is_random)
    [bernoulli]
    """
    return operator_of(node).random
