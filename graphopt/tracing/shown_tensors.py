"""What is shown of a tensor that has a gradient function, which the tensors of a graph have not.

    print("loss:", loss)        loss: tensor(0.6931, grad_fn=<NllLossBackward0>)

Autograd records in a trace what it records in eager code, so that the function's name is known.
Each call shows a tensor of its own values with a function of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.later import Later
from graphopt.tracing.numbers import refusal


@dataclass(frozen=True)
class WithGradientFunction:
    """Gives a tensor of the same values that has a gradient function.

    Attributes:
        name: of the function.
    """

    name: str
    __name__ = "with_gradient_function"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return _compat.with_gradient_function(self.name, tensor)


def shown(tensor: torch.Tensor) -> Any:
    """What is shown in place of a tensor of the trace.

    Raises:
        CaptureError: nobody knows what eager code shows.
    """
    if not tensor.requires_grad:
        return tensor
    name = _compat.gradient_function(tensor)
    if name is None:
        raise _refused("a tensor with what autograd knows of it")
    return Later(WithGradientFunction(name), (tensor,))


def shown_within(value: Any, is_outside: Callable[[Any], bool]) -> Any:
    """The same of a tensor, or a nest of them.

    Args:
        is_outside: whether a container was there before the step.

    Raises:
        CaptureError: as `shown`; or such a container holds a tensor with a gradient function, of
            which each call leaves its values there.
    """
    if isinstance(value, torch.Tensor):
        return shown(value)
    if type(value) not in (list, tuple, dict) or not _holds_history(value):
        return value
    if is_outside(value):
        raise _refused("a list or dictionary outside it with a tensor that has a gradient function")
    if type(value) is dict:
        return {key: shown_within(each, is_outside) for key, each in value.items()}
    return type(value)(shown_within(each, is_outside) for each in value)


def _holds_history(value: Any) -> bool:
    leaves = _compat.tree_leaves(value)
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves)


def _refused(what: str) -> CaptureError:
    return refusal(
        f"it shows {what}, which the tensors of a graph have not",
        "show its value, loss.item() or loss.detach(), or do it in graphopt.callback(print, loss)",
    )
