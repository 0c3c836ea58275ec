"""Conversion of one-element tensors to Python numbers, as `float(tensor)` does."""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.numbers import ReadBool, TracedFloat, as_read, may_be_of_numpy, record


def is_number(value: Any) -> bool:
    """True if a value is a tensor with one real element."""
    return (
        isinstance(value, torch.Tensor)
        and value.numel() == 1
        and not value.is_complex()
        and not _compat.is_transformed(value)
    )


def float_of_tensor(tensor: torch.Tensor) -> Any:
    """`float(tensor)` for a tensor that `is_number` accepts."""
    return float_of_number(integers_of(tensor).item())


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a boolean tensor to integers; others unchanged."""
    return tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor


def float_of_number(number: Any) -> Any:
    """`float(number)`, also for traced numbers."""
    if is_host_number(number):
        return number.taken_here() if type(number.value) is float else record(float, number)
    if type(number) is ReadBool:
        number = number.as_integer()
    if issubclass(type(number), torch.SymInt):
        return as_read(torch.sym_float(number))
    if may_be_of_numpy(number):
        return record(float, number)
    return number if issubclass(type(number), TracedFloat) else float(number)
