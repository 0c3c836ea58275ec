"""BatchNorm with a computed momentum, such as `BatchNorm2d(momentum=None)`, which divides by the
number of batches.

The kernels take a Python float, into which a number of the trace cannot be converted. They are
called with a plain one, and the nodes that record them get what is computed in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from graphopt import _compat

_FACTORS = ("momentum", "exponential_average_factor")
"""The names of the momentum argument in kernels."""

_FUNCTIONS = frozenset({F.batch_norm, torch.batch_norm})
_PLAIN = 0.4375
"""A plain momentum used while a kernel is recorded; it influences nothing."""


def takes(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if a torch function or a node's operator is a BatchNorm with a symbolic momentum."""
    if not any(isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values())):
        return False
    return func in _FUNCTIONS or _position(func) is not None


def call_with_symbol(
    tracer: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Calls a BatchNorm whose momentum is symbolic, and records the symbol in its nodes."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.SymFloat)]
    node = _compat.node_of(tracer, given[0])
    last = next(iter(reversed(tracer.graph.nodes)))
    result = func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
    for kernel in reversed(tracer.graph.nodes):
        if kernel is last:
            break
        _give(kernel, node)
    return result


def _plain(value: Any) -> Any:
    return _PLAIN if isinstance(value, torch.SymFloat) else value


def _give(kernel: fx.Node, factor: fx.Node | None) -> None:
    """Replaces the placeholder momentum of a node by the computed one."""
    position = _position(kernel.target)
    if position is None:
        return
    name = _names(kernel.target)[position]
    if len(kernel.args) > position and kernel.args[position] == _PLAIN:
        kernel.update_arg(position, factor)
    elif kernel.kwargs.get(name) == _PLAIN:
        kernel.update_kwarg(name, factor)


def _position(target: Any) -> int | None:
    """Returns the position of an operator's momentum argument, or None."""
    if not isinstance(target, _compat.OpOverload) or "batch_norm" not in _compat.operator_name(
        target
    ):
        return None
    names = _names(target)
    return next((names.index(name) for name in _FACTORS if name in names), None)


def _names(target: Any) -> list[str]:
    return [argument.name for argument in _compat.schema_of(target).arguments]
