"""Optimizers, as their schedulers see them."""

from __future__ import annotations

from typing import Any

import torch


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers, which warn otherwise, that the optimizer has stepped."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """True if schedulers take it that the optimizer has stepped."""
    return getattr(optimizer, "_opt_called", False) is True


class StandInOptimizer:
    """What a scheduler finds in place of its optimizer: parameter groups without parameters.

    Args:
        optimizer: in whose place.
        param_groups: as they are there, to be changed.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, param_groups: list[dict[str, Any]]
    ) -> None:
        self.param_groups, self.defaults = param_groups, dict(optimizer.defaults)
        self.state: dict[Any, Any] = {}
        self._opt_called = True

    def step(self) -> None:
        """Schedulers look at it, and warn where it is not as they have left it."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
