"""Functional tensors: in-place operators on them become new values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)


def functional_mode() -> AbstractContextManager[Any]:
    """The mode in which torch functionalizes operators on functional tensors."""
    return FunctionalTensorMode()


def without_functional_mode() -> AbstractContextManager[Any]:
    """While active, operators are not functionalized."""
    return disable_functional_mode()


def to_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Wraps a tensor for functionalization."""
    return FunctionalTensor.to_functional(tensor)


def from_functional(value: Any) -> Any:
    """The tensor in a functional wrapper, after all writes through aliases."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def replace_functional_value(wrapper: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the tensor in a functional wrapper by one of equal elements, perhaps with other
    strides."""
    torch._functionalize_replace(wrapper.elem, value)  # type: ignore[attr-defined]
