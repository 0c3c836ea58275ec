"""`target.unsqueeze_(-1)`: a tensor that a step has been given gets another shape in place.

While a step is traced, the stand-in becomes a name for the view that the operator without the
underscore gives: written to and read through either. After every call an argument gets its new
shape and strides, as in eager code, over the memory that it has:

    target.unsqueeze_(-1)      target = view of the input       after the call: target.as_strided_
    target.squeeze_(-1)        target = view of that view       nothing, it is as it was

Tensors that belong to a model, or to nobody, have to be as they were when the step is over. But one
outside that the step resizes before it does anything else with it
(`image.resize_(x.size()).copy_(x)`) is resized before each call runs: the graph takes it as it is
then, and it may end with other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line, is_own_file
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import Finder
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
        shrunk: the same of tensors outside, by their numbers.

    Args:
        alone: no other rank runs the same step.
    """

    def __init__(
        self, call: Call, inputs: Inputs, traced: Traced, finder: Finder, alone: bool
    ) -> None:
        self._finder = finder
        self._outside = dict(_resizable(inputs, traced)) if alone else {}
        self._unused = set(self._outside)
        resized = {id(tensor) for tensor, _ in call.besides.resized}
        self._first = set(resized)
        self._positions = dict(_positions(call, inputs, traced))
        self._numbers = {
            id(traced.by_id[id(entry.tensor)]): number
            for number, entry in enumerate(inputs.module_tensors)
            if id(entry.tensor) in resized
        }
        self._inputs = set(map(id, traced.by_id.values()))
        self._tracer = _compat.current_tracer()
        self._before: dict[int, tuple[torch.Tensor, Shape, SourceLine | None]] = {}
        self.reshaped: dict[int, Shape] = {}
        self.shrunk: dict[int, Shape] = {}

    def uses(self, func: Any, args: Any, kwargs: dict[str, Any], caller: FrameType) -> None:
        """The step, or torch for it, calls a function of torch."""
        if not self._unused:
            return
        given = args[1:] if func in _RESIZING else args
        used = self._unused.intersection(map(id, _compat.tree_leaves((given, kwargs))))
        if used and not is_own_file(caller.f_code.co_filename):
            self._unused -= used

    def _resized_first(self, target: torch.Tensor, shape: torch.Size) -> None:
        """An input is resized: let it be so before each call, if nothing has been done with it."""
        real = self._outside.get(id(target))
        unused = id(target) in self._unused
        self._unused.discard(id(target))
        if real is None or not unused or not _may_grow(real, shape):
            return
        if id(real) not in self._first:
            self._finder.resizes(real, shape)
            raise _refusal("a tensor from outside its arguments", current_user_line())
        self._first.discard(id(real))

    def done(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Do what a torch function does, if it gives an input another shape; None otherwise."""
        if func not in _VIEWS and func not in _RESIZING and func is not torch.Tensor.set_:
            return None
        target: torch.Tensor = args[0]
        if id(target) not in self._inputs or target.requires_grad or has_gradient(target):
            return None
        if func in _RESIZING and not kwargs:
            shape = _wanted(func, args)
            self._resized_first(target, shape)
            if shape == target.shape:  # it is again what it is
                return target
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
        if self._first:
            raise _refusal("a tensor from outside its arguments", current_user_line())
        for target, before, line in self._before.values():
            if _shape(target) == before:
                continue
            if id(target) in self._numbers:
                self.shrunk[self._numbers[id(target)]] = _shape(target)
            elif id(target) in self._positions:
                self.reshaped[self._positions[id(target)]] = _shape(target)
            else:
                what = "a tensor of the model, or from outside its arguments,"
                raise _refusal(what, line)


def _refusal(what: str, line: SourceLine | None) -> CaptureError:
    return CaptureError(
        f"it changes the shape or strides of {what} in place",
        location=None if line is None else str(line),
        hint="use the operator that returns a view, such as x.t() in place of x.t_(); resize a"
        " tensor from outside before anything else is done with it, or make another one",
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
    target = args[0]
    if func not in _RESIZING or kwargs or not target.is_contiguous():
        return None
    shape = _wanted(func, args)
    if shape.numel() > target.numel():
        return None
    shrunk: torch.Tensor = target.as_strided(shape, _contiguous(shape))
    return shrunk


def _wanted(func: Any, args: Any) -> torch.Size:
    """The sizes that a tensor is given."""
    _, *sizes = args
    if func is torch.Tensor.resize_as_:
        shape: torch.Size = sizes[0].shape
        return shape
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    return torch.Size(flat)


def _resizable(inputs: Inputs, traced: Traced) -> Iterator[tuple[int, torch.Tensor]]:
    """Tensors that belong to nobody, and share memory with no input, by the ids of what stands for
    them."""
    alone = {id(holder) for holder in inputs.placeholders}
    for entry in inputs.module_tensors:
        if entry.bare and id(entry) in alone and not entry.tensor.requires_grad:
            yield id(traced.by_id[id(entry.tensor)]), entry.tensor


def _may_grow(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Whether the very storage of a tensor is enough, or may become so."""
    storage = tensor.untyped_storage()
    needed = (tensor.storage_offset() + shape.numel()) * tensor.element_size()
    return tensor.is_contiguous() and bool(needed <= storage.nbytes() or storage.resizable())


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _shape(tensor: torch.Tensor) -> Shape:
    return tuple(tensor.shape), tensor.stride()
