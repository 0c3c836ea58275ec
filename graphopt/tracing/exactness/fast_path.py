"""Fused inference kernels of attention and encoder layers, chosen in a trace as in eager code.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call one kernel for the whole layer where
no gradient is asked for, which rounds otherwise than their operators do. They do not where they
find that they are traced, which they are not told here.

    with torch.no_grad(): teacher.eval()(x)    ==>    _transformer_encoder_layer_fwd(x, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.interception.replaced_functions import calling_frame, replaced


@contextmanager
def as_in_eager() -> Iterator[None]:
    """While active, layers choose their kernels as if nothing was traced."""
    with replaced(
        (torch.overrides, "has_torch_function", _have_own_code), _compat.asking_for_tracers()
    ):
        yield


_has_torch_function = torch.overrides.has_torch_function
_LAYERS = frozenset({"torch.nn.modules.activation", "torch.nn.modules.transformer"})


def _have_own_code(tensors: Sequence[Any]) -> bool:
    """The answer to a layer's question if tensors have a user's class with its own operators.
    Others get the answer that they get."""
    if calling_frame().f_globals.get("__name__") not in _LAYERS:
        return bool(_has_torch_function(tensors))
    plain = (torch.Tensor, nn.Parameter, type(None))
    return any(type(each) not in plain and not _compat.is_fake(each) for each in tensors)


def packs(function: Any) -> bool:
    """True if a function packs padded sequences into a nested tensor, as an encoder does in
    evaluation."""
    return getattr(function, "__name__", "").startswith("_nested_tensor_from_mask")


def nested() -> CaptureError:
    """Builds the error for a step that packs sequences into a nested tensor."""
    return CaptureError(
        "it runs a TransformerEncoder with a padding mask in evaluation, which packs sequences into"
        " a nested tensor",
        location=current_location(),
        hint="make it with enable_nested_tensor=False, in eager code as well: what it gives for"
        " padding is another value then",
    )


def results_of(function: Any, args: Sequence[Any]) -> Any | None:
    """The result shapes of a fused attention or encoder kernel, as meta tensors; else None."""
    shapes = _SHAPES.get(function)
    return None if shapes is None else shapes(*args)


def _of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, heads: int, *args: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    given = dict(enumerate(args))
    batch, length, _ = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device="meta")
    if not given.get(_NEEDS_WEIGHTS, True):
        return output, None
    averaged = given.get(_NEEDS_WEIGHTS + 1, True)
    shape = (batch, length, length) if averaged else (batch, heads, length, length)
    return output, torch.empty(shape, dtype=query.dtype, device="meta")


_NEEDS_WEIGHTS = 5
"""Behind the number of heads come two weights, two biases and a mask."""


def _of_layer(source: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._native_multi_head_attention.default: _of_attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: _of_layer,
}
