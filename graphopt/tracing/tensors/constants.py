"""Tensors that a step creates from numbers: `torch.tensor(x.item())`, `torch.Tensor([1, 2])`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt.tracing.scalars.numbers import TracedFloat

_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)


def holds_read(value: Any) -> bool:
    """True if nested lists contain numbers that are known only when a step runs."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_read, value))
    if issubclass(type(value), TracedFloat):
        return not isinstance(value, int)  # integers that are known before a call are constants
    return issubclass(type(value), _SYMBOLIC)


def holds_tensors(value: Any) -> bool:
    """True if nested lists of numbers contain tensors."""
    if not isinstance(value, (list, tuple)):
        return False
    return any(
        each.numel() == 1 if isinstance(each, torch.Tensor) else holds_tensors(each)
        for each in value
    )


def from_numbers(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`torch.tensor(data)` for nested lists with numbers computed by the graph.

    Args:
        options: options that change nothing here, such as `copy` and `pin_memory`.
    """
    if dtype is None:
        dtype = _dtype_of(data)
    return _stacked(data, dtype, device).requires_grad_(requires_grad)


def by_class(callee: Any, args: Sequence[Any]) -> Callable[..., torch.Tensor] | None:
    """The function to call instead of a constructor such as `torch.FloatTensor` for numbers of
    the graph; None for other callees."""
    if len(args) != 1 or type(args[0]) not in (list, tuple) or not holds_read(args[0]):
        return None
    legacy = _compat.made_by_legacy(callee)
    if legacy is None:
        return None
    dtype, device = legacy
    return lambda numbers: from_numbers(list(numbers), dtype, device)


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(each, dtype, device) for each in data])
    if isinstance(data, torch.Tensor):
        return data.detach().reshape(()).to(dtype=dtype, device=device)
    return torch.scalar_tensor(data, dtype=dtype, device=device)


def _dtype_of(data: Any) -> torch.dtype:
    if isinstance(data, (list, tuple)):
        found = torch.bool
        for each in data:
            found = torch.promote_types(found, _dtype_of(each))
        return found
    if isinstance(data, torch.Tensor):
        return data.dtype
    if isinstance(data, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(data, (int, torch.SymInt)):
        return torch.int64
    return torch.get_default_dtype()


def is_new(tensor: torch.Tensor) -> bool:
    """True if a new tensor has memory of its own, not that of an array or a file."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta:
        return False
    return bool(tensor.untyped_storage().resizable())


def constant_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's current values that each call of the graph creates."""
    with _compat.without_modes():
        own = tensor.detach().clone()  # the graph keeps it
    result: torch.Tensor = torch.ops.aten.lift_fresh_copy(own)
    return result
