"""The grad and autocast modes in which a step calls a host callback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class GradientModes:
    """The grad mode, and for each device type if autocast is on, with its dtype."""

    gradients: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> GradientModes:
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _DEVICES
            ),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While active, the recorded modes are in effect."""
        now = GradientModes.now()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for wanted, present in zip(self.autocast, now.autocast, strict=True):
                if wanted != present:
                    device, on, dtype = wanted
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
            yield
