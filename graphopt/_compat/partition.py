"""Private torch APIs for splitting a graph into submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.autograd import grad_mode

EXIT_OF: dict[Any, Callable[..., None]] = {
    autocast_mode._enter_autocast: autocast_mode._exit_autocast,
    grad_mode._enter_inference_mode: grad_mode._exit_inference_mode,
}
"""Functions that enter a region of a graph, and those that take their result and leave it."""

ENTER_INFERENCE_MODE: Any = grad_mode._enter_inference_mode
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled


def free_symbols(values: list[torch.Tensor | torch.SymInt]) -> set[Any]:
    """The symbols in the sizes and strides of values."""
    from torch.fx.experimental import symbolic_shapes

    return set(symbolic_shapes.free_symbols(values))


def bound_symbol(value: torch.SymInt) -> Any | None:
    """The symbol of a symbolic number, or None for an expression, a constant, or the size of a
    nested tensor."""
    expression = getattr(value.node, "expr", None)
    return expression if getattr(expression, "is_Symbol", False) else None


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True if a buffer is in the module's `state_dict`."""
    return buffer not in module._non_persistent_buffers_set
