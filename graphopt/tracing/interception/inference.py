"""`torch.inference_mode` inside a traced step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphopt.tracing.interception.replaced_functions import replaced


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While active, inference mode acts as `no_grad`, since views of inference tensors cannot be
    traced. What a step returns from it are plain tensors."""
    kind = torch.inference_mode
    left: dict[int, list[Any]] = {}

    def enter(self: Any) -> None:
        context = torch.set_grad_enabled(not self.mode)
        context.__enter__()
        left.setdefault(id(self), []).append(context)

    def leave(self: Any, *exception: Any) -> None:
        left[id(self)].pop().__exit__(*exception)

    with replaced((kind, "__enter__", enter), (kind, "__exit__", leave)):
        yield
