"""Replacement of traced numbers by plain ones in calls of torch functions that need these."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graphopt.tracing.rollback.nests import with_leaves
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.numbers import TakenInt
from graphopt.tracing.scalars.positions import placed

_ON_NUMBERS = frozenset(
    {"add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "rsub",
     "radd", "rmul", "rdiv", "rtruediv", "truediv", "rpow", "iadd", "isub", "imul", "itruediv",
     "lerp", "addcmul", "addcdiv", "full_like", "fill"}
)  # fmt: skip
"""Torch functions that take an integer for the floating-point number that it is equal to, where
their tensors are of floating point."""

_NEVER_SIZES = _ON_NUMBERS | {
    *("eq", "ne", "lt", "le", "gt", "ge", "clamp", "clip", "clamp_min", "clamp_max", "where"),
    *("masked_fill", "remainder", "fmod", "mod", "rmod", "floor_divide", "floordiv", "rfloordiv"),
    *("sym_float", "tensor", "as_tensor"),
}
"""Torch functions for which an integer is a number to compute with, and no size or position."""

_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
_OF_TORCH = frozenset({"aten", "prims", "prim", "_c10d_functional", "c10d", "profiler", "graphopt"})


def concrete(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replaces numbers known before the call by plain ones where a torch function needs integers or
    numpy floats; all of them for a user's operator."""
    if _is_of_program(function):
        return with_leaves(args, _plain), with_leaves(kwargs, _plain)
    if not _any_special((args, kwargs)):
        return args, kwargs
    args, kwargs = placed(function, args, kwargs)
    if not _any_special((args, kwargs)):
        return args, kwargs
    name = getattr(function, "__name__", "").removeprefix("_foreach_").strip("_")
    if name in _ON_NUMBERS and _all_floating((args, kwargs)):
        return args, kwargs
    change = partial(_concrete, name not in _NEVER_SIZES)
    return with_leaves(args, change), with_leaves(kwargs, change)


def _is_of_program(function: Any) -> bool:
    """True for a user's operator, whose kernel takes plain numbers."""
    return isinstance(function, _OPERATORS) and str(function).partition(".")[0] not in _OF_TORCH


def _plain(value: Any) -> Any:
    """The plain number for one that is known before the call; other values unchanged."""
    return value.exactly() if is_host_number(value) else value


def _any_special(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_any_special, value))
    if isinstance(value, dict):
        return any(map(_any_special, value.values()))
    if isinstance(value, slice):
        return any(map(_any_special, (value.start, value.stop, value.step)))
    if type(value) is TakenInt:
        return True
    return is_host_number(value) and type(value.value) is not float


def _all_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    if isinstance(value, (list, tuple)):
        return all(map(_all_floating, value))
    if isinstance(value, dict):
        return all(map(_all_floating, value.values()))
    return True


def _concrete(taken: bool, value: Any) -> Any:
    """The plain number for a traced integer or numpy float; other values unchanged.

    Args:
        taken: whether integers that were taken from tensors are replaced as well.
    """
    if type(value) is TakenInt:
        return int(value) if taken else value
    if is_host_number(value):
        return value if type(value.value) is float else value.exactly()
    return value
