"""Private torch APIs for splitting a graph into submodules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.amp import autocast_mode
from torch.autograd import grad_mode

EXIT_OF: dict[Any, Callable[..., None]] = {
    autocast_mode._enter_autocast: autocast_mode._exit_autocast,
    grad_mode._enter_inference_mode: grad_mode._exit_inference_mode,
}
"""Functions that enter a region of a graph, and those that take their result and leave it."""

ENTER_INFERENCE_MODE: Any = grad_mode._enter_inference_mode
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def free_symbols(value: torch.Tensor | torch.SymInt) -> set[Any]:
    """The symbols in the sizes and strides of a value."""
    return {symbol for number in _numbers(value) for symbol in _expression_symbols(number)}


def bound_symbol(value: torch.SymInt) -> Any | None:
    """The symbol of a symbolic number, or None for an expression or constant."""
    expression = _expression(value)
    return expression if getattr(expression, "is_Symbol", False) else None


def _numbers(value: torch.Tensor | torch.SymInt) -> Iterator[Any]:
    if not isinstance(value, torch.Tensor):
        yield value
        return
    yield from value.shape
    if value.layout is torch.strided and not value.is_nested:
        yield from value.stride()
        yield value.storage_offset()


def _expression_symbols(number: Any) -> set[Any]:
    expression = _expression(number) if isinstance(number, torch.SymInt) else None
    return expression.free_symbols if expression is not None else set()


def _expression(number: torch.SymInt) -> Any | None:
    """The expression of a symbolic number, or None for sizes of nested tensors."""
    from torch.fx.experimental.sym_node import SymNode

    return number.node.expr if isinstance(number.node, SymNode) else None


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True if a buffer is in the module's `state_dict`."""
    return buffer not in module._non_persistent_buffers_set


def share_signature(source: fx.Graph, destination: fx.Graph) -> None:
    """Copies the pytree convention of `source`'s arguments and results to `destination`.

    Their structure is not copied: nobody changes it, and copying warns in torch 2.13.
    """
    destination.set_codegen(copy.copy(source._codegen))
