"""Autograd functions on the tensors that a stage receives from and sends to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphopt import _compat


class _Receive(torch.autograd.Function):
    """Identity with a contiguous gradient, as point-to-point communication needs it."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def receive(value: torch.Tensor) -> torch.Tensor:
    """A received tensor, whose gradient is sent back contiguous."""
    return _Receive.apply(value)  # type: ignore[no-any-return]


class _Return(torch.autograd.Function):
    """Identity to a tensor with a shared version counter: autograd sees updates in place."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def give_back(value: torch.Tensor) -> torch.Tensor:
    """The last stage's result for a loss function, which may change it in place.

    A parameter is copied, since autograd allows no such change of it.
    """
    dense = value.contiguous()
    if dense.requires_grad and dense.is_leaf:
        return dense.clone()
    return _Return.apply(dense)  # type: ignore[no-any-return]


def send(value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that autograd does not take for a view: schedules detach it in place."""
    return no_view(value.contiguous())


def no_view(value: torch.Tensor) -> torch.Tensor:
    """A copy-free tensor equal to `value` that autograd does not take for a view of it."""
    return torch.ops.aten._unsafe_view.default(value, value.shape)  # type: ignore[no-any-return]


def apart(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors `values`, copied where they share storage with one of `others`."""
    taken = set(map(_compat.storage_key, others))
    return [value.clone() if _compat.storage_key(value) in taken else value for value in values]
