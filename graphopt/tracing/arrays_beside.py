"""Arrays of numpy's on the right of a tensor, which numpy computes with it, and not torch.

    advantage = rewards + gamma * values - baseline.numpy()

The result is a tensor in the memory of what numpy gives, of numpy's dtype and without a history: a
node computes it so in each call (`in_graph`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.arrays import is_of_numpy
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.later import Later, argument
from graphopt.tracing.running_trace import current_trace


class ArrayBeside:
    """Stands for an array, or for what may be one, on the right of a tensor.

    Args:
        value: that Python computes.
    """

    def __init__(self, value: Later) -> None:
        self._value = value


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[ArrayBeside, torch.Tensor], Any]:
    return lambda self, tensor: current_trace().beside(function, tensor, self._value)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(ArrayBeside, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(ArrayBeside, f"__r{_name.strip('_')}__", _reflected(getattr(operator, _name)))


def beside(left: Any, right: Any) -> ArrayBeside | None:
    """What stands on the right of a tensor for an array, or what may be one; None: itself."""
    if not _compat.is_fake(left) or is_host_number(right):
        return None
    if type(right) is Later:
        return ArrayBeside(right)
    if not is_of_numpy(right) or not right.ndim or right.dtype.hasobject:
        return None
    return ArrayBeside(argument(right))
