"""Optimizers, as their schedulers see them."""

from __future__ import annotations

import torch


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers, which warn otherwise, that the optimizer has stepped."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]
