"""Shape checks that neither kernels nor shape rules make, so that bad shapes would corrupt memory.

A kernel that is given others reads or writes memory that is not its own, and may end the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.operators import arguments_by_name, fused_optimizer

aten = torch.ops.aten


def check(func: Any, args: Any, kwargs: Any) -> None:
    """Checks an operator's arguments before its kernel may run.

    Raises:
        RuntimeError: tensors that do not belong together are given to a fused optimizer, or to the
            backward of a normalization or of a logarithmic softmax.
    """
    if fused_optimizer(func) is not None:
        _check_entries(func, arguments_by_name(func, args, kwargs))
        return
    rule = _BACKWARDS.get(func)
    if rule is None:
        return
    given = arguments_by_name(func, args, kwargs)
    tensors = (value for value in given.values() if isinstance(value, torch.Tensor))
    if not any(map(_compat.has_symbolic_shape, tensors)):
        rule(func, given)


def _check_entries(func: Any, given: Mapping[str, Any]) -> None:
    """Refuses list entries of different shapes, since kernels write as many elements as the first
    has."""
    lists = {n: v for n, v in given.items() if isinstance(v, (list, tuple)) and v}
    if any(_compat.has_symbolic_shape(tensor) for each in lists.values() for tensor in each):
        return
    steps = lists.pop("state_steps", ())
    shapes = {name: [tensor.shape for tensor in each] for name, each in lists.items()}
    first = shapes["self"]
    for name, found in shapes.items():
        if found != first:
            raise RuntimeError(f"{func}: shapes of {name} are not those of what is updated")
    if steps and [tensor.numel() for tensor in steps] != [1] * len(first):
        raise RuntimeError(f"{func}: there is not one number in each of state_steps")


def _check_batch_norm(func: Any, given: Mapping[str, Any]) -> None:
    """Refuses a number of statistics other than that of channels: the batch's in training, else the
    buffers'."""
    train = given["train"] if "train" in given else given["update"]
    saved = ("save_mean", "save_invstd" if "save_invstd" in given else "save_var")
    channels = given["input"].shape[1]
    for name in saved if train else ("running_mean", "running_var"):
        _check_numbers(func, name, given[name], channels)


def _check_layer_norm(func: Any, given: Mapping[str, Any]) -> None:
    """Refuses a number of statistics other than that of separately normalized rows."""
    shape = given["input"].shape
    places = math.prod(shape[: len(shape) - len(given["normalized_shape"])])
    for name in ("mean", "rstd"):
        _check_numbers(func, name, given[name], places)


def _check_output(func: Any, given: Mapping[str, Any]) -> None:
    """Refuses a saved forward result of another shape than the gradient."""
    _check_numbers(func, "output", given["output"], given["grad_output"].numel())


def _check_numbers(func: Any, name: str, tensor: torch.Tensor | None, count: int) -> None:
    found = "none" if tensor is None else tensor.numel()
    if found != count:
        raise RuntimeError(f"{func}: {name} has {found} of the {count} numbers that are read")


_BACKWARDS: dict[Any, Callable[[Any, Mapping[str, Any]], None]] = {
    aten.native_batch_norm_backward.default: _check_batch_norm,
    aten.batch_norm_backward.default: _check_batch_norm,
    aten.native_layer_norm_backward.default: _check_layer_norm,
    aten._log_softmax_backward_data.default: _check_output,
}
"""Backwards that index saved tensors without checking their sizes."""
