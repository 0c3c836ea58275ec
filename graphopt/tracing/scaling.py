"""`torch.amp.GradScaler` under tracing.

Whether gradients are finite is a decision by value as any other; scale and growth tracker are
tensors outside modules, which become inputs. Two things are done as the graph needs them: the
tensors are there before they are used, and what the scaler notes of each optimizer during a step
leaves no trace in the scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import GradScaler

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.replace import replaced
from graphopt.tracing.source import current_user_line


@contextmanager
def traced_scaling() -> Iterator[None]:
    """While active, an enabled GradScaler can be traced; a disabled one does nothing."""
    changed = (("scale", _scale), ("step", _step), ("update", _update))
    with replaced(*((GradScaler, n, f(getattr(GradScaler, n))) for n, f in changed)):
        yield


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled() and self._scale is None:
            tensors = [x for x in _compat.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
            if tensors:
                with _compat.without_modes():  # as the first call makes them, with its own values
                    self._lazy_init_scale_growth_tracker(tensors[0].device)
        return original(self, outputs)

    return scale


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise CaptureError(
                f"it steps a {type(optimizer).__name__} with fused=True through an enabled"
                " GradScaler, which hands it the scale unseen",
                location=str(current_user_line()),
                hint="make the optimizer without fused=True, or train in bfloat16 autocast, which"
                " needs no loss scaling",
            )
        return original(self, optimizer, *args, **kwargs)

    return step


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, new_scale: Any = None) -> None:
        if not self.is_enabled():
            original(self, new_scale)
            return
        notes = self._per_optimizer_states
        original(self, new_scale)
        notes.clear()
        self._per_optimizer_states = notes

    return update
