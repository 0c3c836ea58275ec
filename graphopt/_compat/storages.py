"""The number or hash by which a storage is known, a different one for a fake tensor's storage.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

STORAGES = (torch.UntypedStorage, torch.TypedStorage)

REFERENCE: Any = StorageWeakRef
"""Knows a storage by its number, as long as somebody keeps it."""

METHODS = ("data_ptr", "_weak_ref", "__hash__")
"""Methods of storages."""

NUMBERS: tuple[tuple[Any, str], ...] = (
    *((storage, "_cdata") for storage in STORAGES),
    (torch.Tensor, "_cdata"),
)
"""Attributes, by the class: where a storage or a tensor is in C++."""

_UNTYPED: Any = torch._C.StorageBase


def number_of(storage: Any) -> int:
    """The number of a storage, whatever stands for the attribute that says it."""
    return int(_UNTYPED._cdata.__get__(storage))


def address_of(storage: torch.UntypedStorage) -> int:
    """Where a storage's memory begins, whatever stands for the method that says it."""
    return int(_UNTYPED.data_ptr(storage))


VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""How often a tensor has been written, as a function mode sees it asked."""
