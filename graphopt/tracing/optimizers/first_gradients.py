"""Gradients of earlier calls that a step drops before reading them.

    optimizer.zero_grad()        the first that the step does with `weight.grad`
    loss.backward()

It is all the same to such a step what that gradient is, and whether there is one: it is no input of
the graph, and no guard asks for it.
"""

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
    """The first use of each gradient in one trace."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._dropped: set[int] = set()

    def note(self, func: Any, tensor: torch.Tensor) -> None:
        """Records that the step uses the gradient of a tensor."""
        if id(tensor) not in self._used:
            self._used.add(id(tensor))
            if func != READ or _is_zeroed():
                self._dropped.add(id(tensor))

    def look(self, tensor: torch.Tensor) -> None:
        """Records that averages over ranks look at the gradient of a parameter."""
        self._used.add(id(tensor))

    def drops(self, tensor: torch.Tensor) -> bool:
        """True if the gradient that a tensor has when the step begins is dropped unread."""
        return id(tensor) in self._dropped


def _is_zeroed() -> bool:
    """True if a `zero_grad` of torch's asks for a gradient, to put None in its place."""
    frame = next(f for f in frames(sys._getframe(1)) if not is_own_file(f.f_code.co_filename))
    code = frame.f_code
    if (code.co_filename, code.co_name, code.co_firstlineno) not in _ZEROING:
        return False
    return bool(frame.f_locals["set_to_none"])
