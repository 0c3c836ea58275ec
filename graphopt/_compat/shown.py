"""What torch's text of a tensor says of its gradient function."""

from __future__ import annotations

import functools
from typing import Any

import torch


def gradient_function(tensor: torch.Tensor) -> str | None:
    """The name of a tensor's gradient function in its text; None where there is none of torch's or
    the program's."""
    function = tensor.grad_fn
    name = type(function).__name__
    if function is None or name == "CppFunction":
        return None
    forward = getattr(function, "_forward_cls", None)
    own = getattr(forward, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
    return None if own else name


def with_gradient_function(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values, the text of which has a gradient function of this name."""
    with torch.enable_grad():
        shown: torch.Tensor = _function(name).apply(tensor.detach().requires_grad_())
    return shown


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@functools.lru_cache(maxsize=256)
def _function(name: str) -> Any:
    function = type("Shown", (_Copy,), {})
    function._backward_cls.__name__ = name  # type: ignore[attr-defined]
    return function
