"""Autocast's cache of weight casts: refused if it outlasts a call, reproduced within a step.

Autocast caches the casts of weights until its outermost region is left. In a region around several
calls, eager code goes on with the casts of before an update, which no graph of one step can repeat.
A region that the step enters itself ends in the step, and one with `cache_enabled=False` keeps
nothing: these two are captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location, own_location
from graphopt.tracing.interception.replaced_functions import is_in, replaced
from graphopt.tracing.scalars.numbers import refused


def refuse_kept_casts() -> None:
    """Refuses a call inside an autocast region that caches casts across calls.

    Raises:
        CaptureError: autocast is on around the call, and keeps casts.
    """
    if torch.is_autocast_cache_enabled() and _is_on():
        raise CaptureError(
            "it is called under autocast, which keeps the casts of weights until its outermost"
            " region is left, even after a step has updated them",
            location=current_location(),
            hint="enter autocast in the step: with torch.autocast(…) around the forward; or give"
            " the region around the call cache_enabled=False",
        )


def refuse_switched(callee: Any) -> None:
    """Refuses a step that switches autocast without entering a region.

    Raises:
        CaptureError: it does.
    """
    if is_in(callee, _SWITCHES):
        raise refused(
            CaptureError(
                f"it switches autocast by torch.{callee.__name__}(), without a region at whose end"
                " the casts of weights that autocast keeps are dropped",
                location=own_location(),
                hint="enter a region in the step: with torch.autocast(…)",
            )
        )


_SWITCHES = frozenset(
    function for name, function in vars(torch).items() if name.startswith("set_autocast_")
)


class StepCasts:
    """Autocast's weight cache during one trace.

    Attributes:
        kept: whether the step has entered a region that keeps casts until it is left.
    """

    def __init__(self) -> None:
        self.kept = False
        self._enabled = torch.is_autocast_cache_enabled()
        self._around = _compat.autocast_regions()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, autocast caches weight casts as in eager code, although `make_fx` disables
        that: a weight is cast once, and its gradients are summed before the cast. Emptied on
        leaving where the trace lies in a region, so that no traced tensor stays in it."""
        enable = torch.set_autocast_cache_enabled
        enable(self._enabled)

        def enabled(keep: bool) -> None:
            enable(keep)
            if keep and _is_on():
                self._note()

        try:
            with replaced((torch, "set_autocast_cache_enabled", enabled)):
                yield
        finally:
            if (
                _compat.autocast_regions()
            ):  # else the last region has; other threads have it as well
                torch.clear_autocast_cache()

    def _note(self) -> None:
        """Records that the step enters a caching region; refuses it if a region around the call
        keeps the cache longer."""
        self.kept = True
        if self._around:
            refused(
                CaptureError(
                    "it enters autocast, and is called in another autocast region, which keeps the"
                    " casts of weights until it is left, even after a step has updated them",
                    location=own_location(),
                    hint="leave the region around the call, also where it has enabled=False; or"
                    " give both cache_enabled=False",
                )
            )


def _is_on() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
