"""Tensors whose autograd history is not in the graph: left by an earlier call, or computed by other
code.

    total = total + loss        left without history by each call
    if i % 4 == 0:
        total.backward()        eager goes back through the calls before: refused

Those of a graph have no history. A step that computes with one that an earlier call has left, or
that it finds outside, goes on as eager code does, until a backward would go through it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.tensors.classes import WITH_GRADIENTS

_left: dict[int, weakref.ref[torch.Tensor]] = {}


def leave(value: torch.Tensor) -> None:
    """Marks a tensor that a call leaves and that would have a history in eager code."""
    key = id(value)
    _left[key] = weakref.ref(value, lambda _: _left.pop(key, None))


def is_left(tensor: torch.Tensor) -> bool:
    """True if an earlier call left this tensor, which would have a history in eager code."""
    found = _left.get(id(tensor)) if _left else None
    return found is not None and found() is tensor


def is_computed(tensor: torch.Tensor) -> bool:
    """True if an input has an eager history that is in no graph."""
    return tensor.grad_fn is not None or is_left(tensor)


def kind_of_history(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor's history that a graph is specialized on; None without one."""
    if not is_computed(tensor):
        return None
    hooks = " and hooks" if _compat.hooks_of(tensor) else ""
    return f"computed with gradients{hooks}"


def accumulates(tensor: torch.Tensor) -> bool:
    """True if backwards accumulate gradients in a tensor."""
    return tensor.requires_grad and tensor.is_leaf


def marks_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors stored as attributes of a parameter or buffer, by name."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        for key, value in vars(tensor).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is None:
                yield key, value


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as an input of the trace: without history, and not a view if its stand-in gets
    one."""
    return tensor.data if is_computed(tensor) else tensor


def has_history(value: Any) -> bool:
    """True if a traced tensor was computed with gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def refuse_backward(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], inputs: Iterable[torch.Tensor]
) -> None:
    """Makes stand-ins refuse a backward through them.

    Args:
        pairs: tensors of a call, each with what stands for it.
        inputs: all that stands for tensors of the call. A history may lead to any of these, so that
            gradients for one (`torch.autograd.grad(loss, parameters)`) go through it.

    Raises:
        CaptureError: a tensor has hooks, which gradients for it would call.
    """
    computed = [(t, s) for t, s in pairs if is_computed(t) and not s.requires_grad]
    if not computed:
        return
    apply: Any = _MarkComputed.apply
    with _compat.without_modes():
        source = torch.empty(0, requires_grad=True)
    inputs = list(filter(accumulates, inputs))
    for tensor, stand_in in computed:
        if _compat.hooks_of(tensor):
            raise CaptureError(
                "it uses a tensor with hooks that was computed with gradients outside the step",
                hint=WITH_GRADIENTS,
            )
        with torch.enable_grad():
            apply(stand_in, is_left(tensor), source, *inputs)
    for _, stand_in in computed:
        made: Any = stand_in.grad_fn
        made.version = _compat.version_of(stand_in)


def check_history(name: str, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
    """Refuses a step that changes an input with a history of other code.

    Args:
        stand_in: what stood for the tensor, when the step has been traced.

    Raises:
        CaptureError: it has written to it, or cut its history.
    """
    if tensor.grad_fn is None or is_left(tensor):
        return
    made: Any = stand_in.grad_fn
    if getattr(made, "version", None) != _compat.version_of(stand_in):
        raise CaptureError(
            f"it changes {name} in place, which was computed with gradients outside the step",
            hint="change a copy: tensor.detach().clone()",
        )


class _MarkComputed(torch.autograd.Function):
    """An autograd function that marks a tensor as computed by unknown code."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, left: bool, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.left = left
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        location = current_location()
        if not ctx.left:
            raise CaptureError(
                "a backward goes through a tensor that was computed with gradients outside the"
                " step",
                location=location,
                hint=WITH_GRADIENTS,
            )
        raise CaptureError(
            "a backward goes through a tensor that an earlier call has computed, of which the"
            " history is not kept",
            location=location,
            hint="let one call compute all that its backward goes through; or cut the history where"
            " the tensor is kept: kept = tensor.detach() (a tensor.detach_() between calls is not"
            " seen)",
        )
