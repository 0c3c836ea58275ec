"""Reuse of another trace's nodes, whose results are known, in the current trace."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot, track_tensor_tree

from graphopt._compat.operator_results import name_of_operator


def copied_node(tracer: Any, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Records a node of another trace in this one, with other arguments and the same result
    object."""
    name = name_of_operator(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    new: fx.Node = tracer.create_node(node.op, node.target, args, kwargs, name)
    if "val" in node.meta:  # else None, one of several results
        new.meta["val"] = node.meta["val"]
    return new


def recorded_node(tracer: Any, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
    """A node whose result is known: `value`, made of fake tensors."""
    name = name_of_operator(target) if isinstance(target, torch._ops.OpOverload) else None
    node: fx.Node = tracer.create_node("call_function", target, args, kwargs, name)
    node.meta["val"] = value
    return node


def recorded_item(tracer: Any, node: fx.Node, index: int) -> fx.Node:
    """An item of a recorded node whose results are known."""
    value = node.meta["val"][index]
    return recorded_node(tracer, operator.getitem, (node, index), {}, value)


def known_result(tracer: Any, node: fx.Node) -> Any:
    """The result of a node from `copied_node`, ready as an operand."""
    value = node.meta.get("val")
    if isinstance(value, FakeTensor):
        set_proxy_slot(value, tracer, _ProxyTensor(tracer.proxy(node), None))
    elif value is not None:
        track_tensor_tree(value, tracer.proxy(node), constant=None, tracer=tracer)
    return value


def is_sized(value: Any) -> bool:
    """True if a result is a tensor of known sizes, a symbolic float, or several of these."""
    if isinstance(value, (list, tuple)):
        return all(map(is_sized, value))
    if isinstance(value, FakeTensor):
        return value.layout is torch.strided and not value._has_symbolic_sizes_strides
    return value is None or isinstance(value, torch.SymFloat)
