"""The tensor behind a DTensor, which torch gives no public way to exchange."""

from __future__ import annotations

from typing import Any

import torch


def local_of(dtensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor, as it lies in memory; `to_local` gives another object."""
    found: torch.Tensor = dtensor._local_tensor
    return found


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Let a DTensor be about another tensor of this rank's, of the same shape and dtype."""
    dtensor._local_tensor = local
