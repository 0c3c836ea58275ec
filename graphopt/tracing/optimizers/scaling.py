"""`torch.amp.GradScaler` under tracing.

    scale(loss)          loss * scale                   scale and growth tracker are inputs
    unscale_(optimizer)  gradients / scale, found_inf   one operator
    step(optimizer)      found_inf == 0                 a decision by value
    update()             scale and tracker              updated in place

A scaler has no tensors before it is first used. The trace in which it would make them makes them,
as inputs of the next one; the scaler gets them once the first call has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.amp import GradScaler

from graphopt import _compat
from graphopt._compat import scaling
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.interception.replaced_functions import replaced


class TracedScaling:
    """The gradient scalers of a traced step.

    Args:
        finder: is told what a scaler makes and uses.
        fake: the mode of tensors that are fake outside the trace, if they are.
    """

    def __init__(self, finder: ImplicitInputFinder, fake: Any) -> None:
        self._finder, self._fake = finder, fake
        self._ready: list[GradScaler] = []
        self._used: dict[int, tuple[GradScaler, SourceLine | None]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, calls of gradient scalers can be traced.

        Raises:
            CaptureError: a scaler has unscaled gradients before the step.
        """
        methods = (
            scaling.when_made(self._make),
            scaling.when_used(self._look),
            scaling.when_stepped(),
            scaling.when_updated(),
        )
        try:
            with replaced(*methods):
                yield
        finally:
            for scaler in self._ready:
                scaling.drop_tensors(scaler)

    def finish(self) -> None:
        """Ends the step, while containers still hold what it has stored.

        Raises:
            CaptureError: a scaler unscales gradients in one step and is updated in another.
        """
        for scaler, line in self._used.values():
            if vars(scaler)[scaling.NOTES]:
                raise _not_updated("unscales gradients, and is not updated", line)

    def _make(self, scaler: GradScaler, original: Callable[[], None]) -> None:
        if not self._finder.leads_to(scaler):
            original()  # the step's own
            return
        with _compat.without_modes(), torch.no_grad(), self._fake or nullcontext():
            original()
        self._finder.made(scaler, scaling.scaler_tensors(scaler))
        self._ready.append(scaler)

    def _look(self, scaler: GradScaler) -> None:
        if not self._finder.leads_to(scaler):
            return
        line = current_user_line()
        if id(scaler) not in self._used and vars(scaler)[scaling.NOTES]:
            raise _not_updated("has unscaled gradients before the step", line)
        self._finder.uses(scaler, scaling.READ, scaling.NOTES)
        self._used[id(scaler)] = scaler, line


def _not_updated(what: str, line: SourceLine | None) -> CaptureError:
    return CaptureError(
        f"it uses a GradScaler that {what}",
        location=line,
        hint="call scaler.unscale_(), step() and update() in one step, update() as the last",
    )
