"""The local tensor of a DTensor, which torch gives no public way to exchange."""

from __future__ import annotations

from typing import Any

import torch


def local_of(dtensor: Any) -> torch.Tensor:
    """The local tensor object of a DTensor; `to_local` returns another object."""
    found: torch.Tensor = dtensor._local_tensor
    return found


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Replaces the local tensor of a DTensor by one of the same shape and dtype."""
    dtensor._local_tensor = local
