"""Tensors that a step makes of arrays of numpy's, which it has made itself.

    torch.from_numpy(np.eye(n))     a constant of the graph, as of `torch.tensor(np.eye(n))`

In eager code both have one memory: a step that writes to either of them afterwards is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.record import Record
from graphopt.tracing.source import current_user_line

_UNFILLED = {"empty": "zeros", "empty_like": "zeros_like"}
_MAKERS = frozenset({torch.from_numpy, torch.as_tensor, torch.asarray})


def filled(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in place of `numpy.empty`: what other arrays have left in the memory would be
    another constant in each trace. None in place of other functions."""
    numpy = sys.modules.get("numpy")
    if numpy is None or getattr(callee, "__name__", "") not in _UNFILLED:
        return None
    name = _UNFILLED[callee.__name__]
    return getattr(numpy, name) if callee is getattr(numpy, callee.__name__) else None


class MadeArrays:
    """The arrays of one trace of which tensors are made.

    Args:
        record: of the trace.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._made: list[tuple[Any, bytes, torch.Tensor, int, SourceLine | None]] = []

    def maker(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function that makes a tensor of an array; None: itself."""
        if not args:
            return None
        copied = _compat.made_by_legacy(callee)
        if copied is None and not any(callee is each for each in _MAKERS):
            return None
        if not self._is_made(args[0]):
            return None
        if copied is not None:
            if args[0].ndim == 0:  # an integer is a size there
                return None
            dtype, device = copied
            return lambda array: torch.tensor(array, dtype=dtype, device=device)

        def make(array: Any, *others: Any, **options: Any) -> torch.Tensor:
            tensor = torch.tensor(array, *others, **options)
            known = (array.tobytes(), tensor, _compat.version_of(tensor), current_user_line())
            self._made.append((array, *known))
            return tensor

        return make

    def _is_made(self, value: Any) -> bool:
        if type(value).__module__ != "numpy" or not hasattr(value, "base"):
            return False
        while hasattr(value, "base"):
            if self._record.is_outside(value):
                return False
            value = value.base
        return value is None

    def finish(self) -> None:
        """The step is over.

        Raises:
            CaptureError: it has written to such an array or tensor.
        """
        made, self._made = self._made, []
        for array, before, tensor, version, line in made:
            if array.tobytes() != before or _compat.version_of(tensor) != version:
                raise CaptureError(
                    "it writes to an array, or to the tensor that it has made of it, which share"
                    " their memory",
                    location=str(line),
                    hint="make the tensor by torch.tensor(array), which copies",
                )
