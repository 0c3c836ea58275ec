"""How a step uses gradients before it computes any."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt.ir.user_frames import frames, is_own_file

_GRADIENT = getattr(torch.Tensor, "grad")  # noqa: B009 - typed as the value it gives
READ = _GRADIENT.__get__
ACCESSES = (READ, _GRADIENT.__set__, _GRADIENT.__delete__)


def _where(function: Callable[..., Any]) -> tuple[str, str, int]:
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_name, code.co_firstlineno


_ZEROING = frozenset({_where(Optimizer.zero_grad), _where(torch.nn.Module.zero_grad)})


class FirstGradients:
    """The uses of gradients before a step computes any.

    Attributes:
        dropped: ids of tensors whose gradient is dropped, unread.
        read: the step looks at others.
    """

    def __init__(self) -> None:
        self.dropped: set[int] = set()
        self.read = False

    def note(self, func: Any, tensor: torch.Tensor) -> None:
        """The step uses the gradient of a tensor."""
        if id(tensor) in self.dropped:
            return
        if func == READ and not _is_zeroed():
            self.read = True
        else:
            self.dropped.add(id(tensor))


def _is_zeroed() -> bool:
    """Whether a `zero_grad` of torch's asks for a gradient, to put None in its place."""
    frame = next(f for f in frames(sys._getframe(1)) if not is_own_file(f.f_code.co_filename))
    code = frame.f_code
    if (code.co_filename, code.co_name, code.co_firstlineno) not in _ZEROING:
        return False
    return bool(frame.f_locals["set_to_none"])
