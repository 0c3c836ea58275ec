"""`target.unsqueeze_(-1)`: a tensor that a step has been given gets another shape in place.

While a step is traced, the stand-in becomes a name for the view that the operator without the
underscore gives: written to and read through either. After every call an argument gets its new
shape and strides, as in eager code, over the memory that it has:

    target.unsqueeze_(-1)      target = view of the input       after the call: target.as_strided_
    target.squeeze_(-1)        target = view of that view       nothing, it is as it was

Tensors that belong to a model, or to nobody, have to be as they were when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.source import current_user_line
from graphopt.tracing.substitute import Traced

Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""

_VIEWS: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
}
_RESIZING = (torch.Tensor.resize_, torch.Tensor.resize_as_)


class Reshaping:
    """What one trace does to the shapes of its inputs.

    Attributes:
        reshaped: arguments that end in another shape, by position.
    """

    def __init__(self, call: Call, inputs: Inputs, traced: Traced) -> None:
        self._positions = dict(_positions(call, inputs, traced))
        self._inputs = set(map(id, traced.by_id.values()))
        self._tracer = _compat.current_tracer()
        self._before: dict[int, tuple[torch.Tensor, Shape, SourceLine | None]] = {}
        self.reshaped: dict[int, Shape] = {}

    def done(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Do what a torch function does, if it gives an input another shape; None otherwise."""
        if func not in _VIEWS and func not in _RESIZING and func is not torch.Tensor.set_:
            return None
        target: torch.Tensor = args[0]
        if id(target) not in self._inputs or target.requires_grad or has_gradient(target):
            return None
        with torch.no_grad():
            view = _view(func, args, kwargs)
        if view is None or view.storage_offset() != target.storage_offset():
            if id(target) in self._before:  # whose node is no input any more
                raise _refusal("an input", current_user_line())
            return None
        known = target, _shape(target), current_user_line()
        self._before.setdefault(id(target), known)
        _compat.rebind(self._tracer, target, view)
        torch.autograd.graph.increment_version(target)
        return target

    def finish(self) -> None:
        """The step is over.

        Raises:
            CaptureError: a tensor that is no argument has another shape.
        """
        for target, before, line in self._before.values():
            if _shape(target) == before:
                continue
            position = self._positions.get(id(target))
            if position is None:
                what = "a tensor of the model, or from outside its arguments,"
                raise _refusal(what, line)
            self.reshaped[position] = _shape(target)


def _refusal(what: str, line: SourceLine | None) -> CaptureError:
    return CaptureError(
        f"it changes the shape or strides of {what} in place",
        location=None if line is None else str(line),
        hint="use the operator that returns a view, such as x.t() in place of x.t_()",
    )


def _positions(call: Call, inputs: Inputs, traced: Traced) -> Iterator[tuple[int, int]]:
    """The stand-ins of tensor arguments, by id, each with its position."""
    for position in inputs.user:
        yield id(traced.by_id[id(call.leaves[position])]), position


def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the tensor shows afterwards; None where that needs more memory than it has."""
    if func in _VIEWS:
        view: torch.Tensor = _VIEWS[func](*args, **kwargs)
        return view
    target, *sizes = args
    if func not in _RESIZING or kwargs or not target.is_contiguous():
        return None
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    shape = sizes[0].shape if func is torch.Tensor.resize_as_ else torch.Size(flat)
    if shape.numel() > target.numel():
        return None
    shrunk: torch.Tensor = target.as_strided(shape, _contiguous(shape))
    return shrunk


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape), tensor.stride()
