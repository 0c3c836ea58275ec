"""`float(tensor)` in a step: what `tensor.item()` gives, as a float.

`float` itself can give nothing but a float of this call. So that `type(x) is float` and
`dtype=float` mean what they mean, no name is replaced: where an instruction of the step is about to
call `float`, it calls a function of this file in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.draws.arguments import is_known
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.numbers import ReadInt, TracedFloat, as_read, record


def converting(callee: Any, args: Sequence[Any]) -> Callable[[Any], Any] | None:
    """What is called in place of a function that converts a value of the trace; None where that is
    the function itself."""
    if callee is not float or len(args) != 1:
        return None
    value = args[0]
    if is_known(value):
        return _of_array if value.size == 1 and value.dtype.kind in "fiu" else None
    if issubclass(type(value), (TracedFloat, ReadInt)):
        return _of_number
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return None if _compat.is_transformed(value) else _of_tensor
    return None


def _of_tensor(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.int64)
    return _of_number(tensor.item())


def _of_array(array: Any) -> Any:
    return array.calls.apply(float, (array,))


def _of_number(number: Any) -> Any:
    if is_host_number(number):
        return record(float, number) if isinstance(number, int) else number
    if issubclass(type(number), torch.SymInt):
        return as_read(torch.sym_float(number))
    return number if issubclass(type(number), TracedFloat) else float(number)
