"""Private parts of tensors with late updates: their class, and their reference counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

TensorBase: Any = torch._C.TensorBase
"""What `torch.Tensor` is written on: its methods take tensors of any class, and settle nothing."""

TensorMeta: type[type] = type(torch.Tensor)

_CLASS: Any = vars(object)["__class__"]


without_torch_function: Callable[[], AbstractContextManager[Any]]
without_torch_function = torch._C.DisableTorchFunctionSubclass
"""While active, `__torch_function__` of tensor subclasses is not called in this thread."""


def set_class(tensor: torch.Tensor, kind: type) -> None:
    """Changes the class of a tensor, bypassing the class's own `__class__`.

    Raises:
        TypeError: objects of the two classes are laid out in different ways.
    """
    _CLASS.__set__(tensor, kind)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the same memory and version counter, made without calling the class's
    methods."""
    with without_torch_function():
        alias: torch.Tensor = TensorBase.detach(tensor)
        return alias


put_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = TensorBase.grad.__set__
"""Sets `tensor.grad` without calling the class's methods, where `without_torch_function` is
active."""


def holders_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The reference counts of a tensor's storage (C++, Python) and of the tensor in C++.

    The numbers count what asks as well, in the same way each time.
    """
    with without_torch_function():
        storage = TensorBase.untyped_storage(tensor)
        uses: int = torch._C._storage_Use_Count(storage._cdata)
        return uses, sys.getrefcount(storage), TensorBase._use_count(tensor)
