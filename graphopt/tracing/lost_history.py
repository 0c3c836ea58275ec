"""Tensors that a call of a step has left with an autograd history in eager code.

    total = total + loss        left without history by each call
    if i % 4 == 0:
        total.backward()        eager goes back through the calls before: refused

Those of a graph have no history. A step that computes with one that an earlier call has left goes
on as eager code does, until a backward would go through it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.source import current_user_line

_left: dict[int, weakref.ref[torch.Tensor]] = {}


def leave(value: torch.Tensor) -> None:
    """A call leaves a tensor that has a history in eager code."""
    key = id(value)
    _left[key] = weakref.ref(value, lambda _: _left.pop(key, None))


def is_left(tensor: torch.Tensor) -> bool:
    """Whether a call has left this tensor, which had a history in eager code."""
    found = _left.get(id(tensor)) if _left else None
    return found is not None and found() is tensor


def has_history(value: Any) -> bool:
    """Whether a traced value is a tensor that has been computed with gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf


def refuse_backward(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let stand-ins refuse a backward through them.

    Args:
        pairs: tensors of a call, each with what stands for it.
    """
    apply: Any = _Computed.apply
    for tensor, stand_in in pairs:
        if is_left(tensor) and not stand_in.requires_grad:
            with torch.enable_grad(), _compat.without_modes():
                source = torch.empty(0, requires_grad=True)
            with torch.enable_grad():
                apply(stand_in, source)


class _Computed(torch.autograd.Function):
    """Says of a tensor that it was computed, and not how."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        line = current_user_line()
        raise CaptureError(
            "a backward goes through a tensor that an earlier call has computed, of which the"
            " history is not kept",
            location=None if line is None else str(line),
            hint="let one call compute all that its backward goes through; or cut the history where"
            " the tensor is kept: kept = tensor.detach() (a tensor.detach_() between calls is not"
            " seen)",
        )
