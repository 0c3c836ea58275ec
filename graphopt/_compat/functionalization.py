"""Functional tensors: in-place operators on them become new values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)

functional_mode: Callable[[], AbstractContextManager[Any]] = FunctionalTensorMode
"""The mode in which torch functionalizes operators on functional tensors."""

without_functional_mode: Callable[[], AbstractContextManager[Any]] = disable_functional_mode
"""While active, operators are not functionalized."""

to_functional: Callable[[torch.Tensor], torch.Tensor] = FunctionalTensor.to_functional
"""Wraps a tensor for functionalization."""


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
