"""The grad and autocast modes in which a step calls a host callback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class GradientModes:
    """The grad mode, and for each device type the autocast mode, when this is made."""

    def __init__(self) -> None:
        self._gradients, self._autocast = torch.is_grad_enabled(), _autocast_modes()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While active, the recorded modes are in effect."""
        with ExitStack() as stack:
            now = _autocast_modes()
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            for wanted, present in zip(self._autocast, now, strict=True):
                if wanted != present:
                    stack.enter_context(torch.autocast(*wanted))
            yield


def _autocast_modes() -> list[tuple[str, torch.dtype, bool]]:
    """Returns for each device type the dtype of autocast, and if it is on."""
    return [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    ]
