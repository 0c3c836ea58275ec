"""Autocast regions that several calls of a step share.

Autocast caches the casts of weights until its outermost region is left, so that eager goes on with
the weights of before an update: a program error, which no graph of one step can repeat.
"""

from __future__ import annotations

import torch

from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.failures import definition_of


class CastCache:
    """Finds out whether a cast from before the last update is still cached, by a weight of its
    own that is cast and updated along."""

    def __init__(self) -> None:
        self._weight: torch.Tensor | None = None

    def check(self, call: Call) -> None:
        """Before a call.

        Raises:
            CaptureError: the last call has updated weights in the autocast region of this one.
        """
        if self._weight is None or _depth() == 0 or _is_current(self._weight):
            return
        raise CaptureError(
            "it is called again within one autocast region after it has updated the model: autocast"
            " keeps the casts of the weights as they were before",
            location=str(definition_of(call)),
            hint="enter autocast in the step, or around each call; or give it cache_enabled=False",
        )

    def called(self, stepped: bool) -> None:
        """After a call, which has updated weights or not."""
        if _depth() == 0 or not stepped:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._weight is None:
                self._weight = torch.zeros(1, 1, device="cpu", dtype=torch.float32)
                self._weight.requires_grad_()
            _is_current(self._weight)  # cached from here on
            self._weight.copy_(1 - self._weight)


def _depth() -> int:
    """How many autocast regions are entered."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _is_current(weight: torch.Tensor) -> bool:
    """Whether autocast gives the weight as it is now."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast = torch.mm(torch.ones(1, 1, device="cpu"), weight)
    return bool(cast.item() == weight.item())
