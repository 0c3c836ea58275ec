"""Identity of storages (number, hash, address), also while a trace replaces these attributes.

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
    """The number (`_cdata`) of a storage, even while that attribute is replaced."""
    return int(_UNTYPED._cdata.__get__(storage))


def address_of(storage: torch.UntypedStorage) -> int:
    """The memory address of a storage, even while `data_ptr` is replaced."""
    return int(_UNTYPED.data_ptr(storage))


VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""How often a tensor has been written, as a function mode sees it asked."""
