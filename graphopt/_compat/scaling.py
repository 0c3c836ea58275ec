"""Private parts of `torch.amp.GradScaler`. Written for torch 2.11 to 2.15.

A scaler makes its tensors when it is first used, and notes during a step what it has found out
about the gradients of each optimizer, until `update` drops the notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

Method = tuple[type[GradScaler], str, Any]
"""A class, the name of a method and what stands for it."""


_TENSORS = ("_scale", "_growth_tracker")
READ = (*_TENSORS, "_enabled", "_growth_factor", "_backoff_factor", "_growth_interval")
"""Attributes that a scaler reads in a step."""
NOTES = "_per_optimizer_states"
"""The attribute with its notes."""


def scaler_tensors(scaler: GradScaler) -> dict[str, torch.Tensor]:
    """The scale and growth tensors of a gradient scaler, by attribute name."""
    return {name: vars(scaler)[name] for name in _TENSORS}


def drop_tensors(scaler: GradScaler) -> None:
    """Resets a gradient scaler's tensors to their state before its first use."""
    vars(scaler).update(dict.fromkeys(_TENSORS))


def when_made(make: Callable[[GradScaler, Callable[[], None]], None]) -> Method:
    """A replacement that calls `make(scaler, original)` where a scaler creates its tensors."""
    original = GradScaler._lazy_init_scale_growth_tracker

    def method(self: GradScaler, device: Any) -> None:
        make(self, lambda: original(self, device))

    return GradScaler, "_lazy_init_scale_growth_tracker", method


def when_used(look: Callable[[GradScaler], None]) -> Method:
    """A replacement that calls `look(scaler)` before a scaler uses its tensors."""
    original = GradScaler._check_scale_growth_tracker

    def method(self: GradScaler, name: str) -> Any:
        look(self)
        return original(self, name)

    return GradScaler, "_check_scale_growth_tracker", method


def when_stepped() -> Method:
    """A replacement for the check that all gradients are finite, which is assumed until it is
    known."""

    def method(
        self: GradScaler, optimizer: Any, notes: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = sum(found.item() for found in notes["found_inf_per_device"].values())
        return optimizer.step(*args, **kwargs) if found == 0 else None

    return GradScaler, "_maybe_opt_step", method


def when_updated() -> Method:
    """A replacement that empties the scaler's per-optimizer records instead of replacing them."""
    original = GradScaler.update

    def method(self: GradScaler, new_scale: Any = None) -> None:
        if not self.is_enabled():
            return
        notes = self._per_optimizer_states
        original(self, new_scale)
        for note in notes.values():  # others may have looked at them, and hold them
            note["found_inf_per_device"].clear()
        notes.clear()
        self._per_optimizer_states = notes

    return GradScaler, "update", method
