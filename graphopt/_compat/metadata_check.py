"""A fast check that many tensors still have the same metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C._dynamo import guards

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def metadata_match(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Makes a C++ check that tensors still have their class, dtype, device, sizes, strides and
    `requires_grad`, and that torch's modes are unchanged: 30 ns a tensor instead of 500 in Python.
    It keeps the tensors alive.

    Returns:
        None where one of them is of a class of its own, as with an update in flight, which asking
        for its class would finish, or is not dense.
    """
    once = list({id(tensor): tensor for tensor in tensors}.values())
    if not all(type(tensor) in _PLAIN for tensor in once):
        return None
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in once):
        return None
    sizes = [list(tensor.shape) for tensor in once]
    strides = [list(tensor.stride()) for tensor in once]
    found = guards.TensorGuards(
        *once,
        dynamic_dims_sizes=sizes,  # type: ignore[arg-type]
        dynamic_dims_strides=strides,  # type: ignore[arg-type]
    )
    return partial(found.check, *once)
