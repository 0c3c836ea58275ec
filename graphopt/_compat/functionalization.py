"""Tensors that are functionalized: what is written to them gives new values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def functional_mode() -> AbstractContextManager[Any]:
    """The mode in which torch writes functionally what is done to functional tensors."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode()


def without_functional_mode() -> AbstractContextManager[Any]:
    """While active, operators are called as outside `functional_mode`."""
    from torch._subclasses.functional_tensor import disable_functional_mode

    return disable_functional_mode()


def to_functional(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as functionalization follows it."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(tensor)


def from_functional(value: Any) -> Any:
    """The tensor inside a functional wrapper, with all writes through aliases applied."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def replace_functional_value(wrapper: torch.Tensor, value: torch.Tensor) -> None:
    """Let a functional tensor hold another tensor with the same elements (other strides, say)."""
    torch._functionalize_replace(wrapper.elem, value)  # type: ignore[attr-defined]
