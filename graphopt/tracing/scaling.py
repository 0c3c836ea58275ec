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

from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.replace import replaced
from graphopt.tracing.source import current_user_line


class _NotReady(Exception):
    """A scaler is used whose tensors are not there yet."""

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        super().__init__("a GradScaler makes its tensors")
        self.scaler, self.device = scaler, device


def made_ready(error: CaptureError, call: Call) -> bool:
    """Whether a trace has been refused because a scaler had no tensors; they are there then, with
    the values that its first use gives them, until the call is refused."""
    cause = error.__cause__
    if not isinstance(cause, _NotReady):
        return False
    scaler: Any = cause.scaler
    scaler._lazy_init_scale_growth_tracker(cause.device)
    call.when_refused.append(lambda: vars(scaler).update(_scale=None, _growth_tracker=None))
    return True


@contextmanager
def traced_scaling() -> Iterator[None]:
    """While active, an enabled GradScaler can be traced; a disabled one does nothing."""
    with replaced(
        (GradScaler, "_lazy_init_scale_growth_tracker", _made_too_late),
        (GradScaler, "_get_scale_async", _handed_over),
        (GradScaler, "update", _leaving_nothing(GradScaler.update)),
    ):
        yield


def _made_too_late(self: GradScaler, device: torch.device) -> None:
    raise _NotReady(self, device)


def _handed_over(self: GradScaler) -> Any:
    raise CaptureError(
        "it steps an optimizer with fused=True through an enabled GradScaler, which hands it the"
        " scale unseen",
        location=str(current_user_line()),
        hint="make the optimizer without fused=True, or train in bfloat16 autocast, which needs no"
        " loss scaling",
    )


def _leaving_nothing(original: Callable[..., None]) -> Callable[..., None]:
    def update(self: Any, new_scale: Any = None) -> None:
        if not self.is_enabled():
            return
        notes = self._per_optimizer_states
        original(self, new_scale)
        for note in notes.values():  # others may have looked at them, and hold them
            note["found_inf_per_device"].clear()
        notes.clear()
        self._per_optimizer_states = notes

    return update
