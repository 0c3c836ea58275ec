"""Shape rules of the CTC loss for fake tensors, which torch lacks."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def register_ctc_shapes() -> None:
    """Registers shape rules of `_ctc_loss` and its backward for fake tensors."""
    from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl

    rules: dict[Any, Any] = {
        _aten._ctc_loss.Tensor: _loss,
        _aten._ctc_loss.default: _loss_of_numbers,
        _aten._ctc_loss_backward.Tensor: _gradient,
        _aten._ctc_loss_backward.default: _gradient,
    }
    for operator, rule in rules.items():
        if operator not in op_implementations_dict:
            register_op_impl(operator)(rule)


def _loss(mode: Any, function: Any, log_probs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The losses and the tensor kept for the backward, whose width is known only from the
    longest target."""
    steps, batch, _ = log_probs.shape
    environment = mode.shape_env
    if environment is None:
        from torch._subclasses.fake_tensor import DynamicOutputShapeException

        raise DynamicOutputShapeException(function)
    width = environment.create_unbacked_symint()
    torch._check(width >= 1)
    with mode:
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, width))


def _loss_of_numbers(
    mode: Any,
    function: Any,
    log_probs: torch.Tensor,
    targets: Any,
    inputs: Any,
    lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The losses and the tensor kept for the backward, for lengths given as numbers."""
    steps, batch, _ = log_probs.shape
    width = 2 * max(lengths, default=0) + 1
    with mode:
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, width))


def _gradient(
    mode: Any, function: Any, gradient: Any, log_probs: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
