"""Fused optimizer operators under tracing.

Their schemas take Python floats, into which a symbolic float cannot be converted. The operator is
therefore called with plain numbers, and the node that records it gets the symbolic ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.families import FUSED_OPTIMIZERS
from graphopt.ir.operators import fused_optimizer
from graphopt.tracing.scalars.host_numbers import ScheduledFloat

FUNCTIONS = {getattr(torch, f"{name}_") for name in FUSED_OPTIMIZERS}
"""The in-place functions that `torch.optim` calls."""


def take_tensor_lr(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replaces a scheduled learning rate among the arguments by its tensor."""
    lr = kwargs.get("lr")
    return {**kwargs, "lr": lr.tensor} if isinstance(lr, ScheduledFloat) else kwargs


def call_with_symbols(tracer: Any, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls an operator whose float keyword arguments may be symbolic."""
    symbols = {key: value for key, value in kwargs.items() if isinstance(value, torch.SymFloat)}
    result = op(*args, **{**kwargs, **dict.fromkeys(symbols, 0.5)})
    if symbols:
        node = _last_fused_node(tracer.graph)
        nodes = {key: _compat.node_of(tracer, value) for key, value in symbols.items()}
        node.kwargs = {**node.kwargs, **nodes}
    return result


def _last_fused_node(graph: fx.Graph) -> fx.Node:
    node: fx.Node
    for node in reversed(graph.nodes):
        if node.op == "call_function" and fused_optimizer(node.target) is not None:
            return node
    raise AssertionError("no fused optimizer node was recorded")
