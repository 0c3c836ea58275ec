"""The kernels that attention and encoder layers run in evaluation, as in eager code.

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
    """While active, layers decide as they do where nobody traces."""
    with replaced(
        (torch.overrides, "has_torch_function", _have_own_code), *_compat.asking_for_tracers()
    ):
        yield


_has_torch_function = torch.overrides.has_torch_function
_LAYERS = frozenset({"torch.nn.modules.activation", "torch.nn.modules.transformer"})


def _have_own_code(tensors: Sequence[Any]) -> bool:
    """What layers ask: whether a class of the program's has a say in what is computed of tensors.
    Others get the answer that they get."""
    if calling_frame().f_globals.get("__name__") not in _LAYERS:
        return bool(_has_torch_function(tensors))
    plain = (torch.Tensor, nn.Parameter, type(None))
    return any(type(each) not in plain and not _compat.is_fake(each) for each in tensors)


def packs(function: Any) -> bool:
    """Whether an encoder packs padded sequences, as it does in evaluation unless it is told not
    to."""
    return getattr(function, "__name__", "").startswith("_nested_tensor_from_mask")


def nested() -> CaptureError:
    """The refusal of a step in which one does."""
    return CaptureError(
        "it runs a TransformerEncoder with a padding mask in evaluation, which packs sequences into"
        " a nested tensor",
        location=current_location(),
        hint="make it with enable_nested_tensor=False, in eager code as well: what it gives for"
        " padding is another value then",
    )


def results_of(function: Any, args: Sequence[Any]) -> Any | None:
    """What one of these kernels gives, on the meta device; None of another operator."""
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
