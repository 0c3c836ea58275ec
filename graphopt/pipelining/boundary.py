"""What a stage does to the tensors it receives from and sends to its neighbours."""

from __future__ import annotations

from typing import Any

import torch


class _Receive(torch.autograd.Function):
    """Identity whose gradient is contiguous, as point-to-point communication needs it."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def receive(value: torch.Tensor) -> torch.Tensor:
    """A received tensor; the gradient sent back for it is contiguous."""
    return _Receive.apply(value)  # type: ignore[no-any-return, no-untyped-call]


def send(value: torch.Tensor) -> torch.Tensor:
    """`value` contiguous and, for autograd, not a view: schedules detach it in place."""
    dense = value.contiguous()
    return torch.ops.aten._unsafe_view.default(dense, dense.shape)  # type: ignore[no-any-return]
