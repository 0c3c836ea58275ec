"""`float(tensor)` and `int(tensor)` in a traced step, traced like `tensor.item()`.

`float` itself can give nothing but a float of this call. So that `type(x) is float` and
`dtype=float` mean what they mean, no name is replaced: where an instruction of the step is about to
call `float`, it calls a function of this file in its place. Nor can functions of `math` take what
is no float; what they stand for is called likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.tracing.interception.class_questions import STANDING_FOR, is_instance_of_numpy
from graphopt.tracing.scalars.host_math import is_choice, traced_form
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.number_of import (
    float_of_number,
    float_of_tensor,
    integers_of,
    is_number,
)
from graphopt.tracing.scalars.numbers import (
    ReadBool,
    ReadFloat,
    ReadInt,
    TracedFloat,
    may_be_of_numpy,
    record,
    taken,
)


def converting(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The function to call in place of a conversion (`float`, `int`, `isinstance`) of a traced
    value, or None."""
    if callee is isinstance and len(args) == 2:
        return _is_instance if type(args[0]) in STANDING_FOR else None
    if callee is not float and callee is not int:
        given = any(map(_is_known_to_trace, args)) or is_choice(callee)
        return traced_form(callee) if given else None
    if len(args) != 1:
        return None
    value = args[0]
    if callee is int:
        return _to_integer(value)
    if issubclass(type(value), (TracedFloat, ReadInt, ReadBool)):
        return float_of_number
    return float_of_tensor if is_number(value) else None


def converted(value: Any) -> Any:
    """`float(value)`, also for traced tensors."""
    return (converting(float, (value,)) or float)(value)


def _is_known_to_trace(value: Any) -> bool:
    return issubclass(type(value), (TracedFloat, ReadInt)) or is_number(value)


def _is_instance(number: Any, kinds: Any) -> bool:
    if may_be_of_numpy(number):
        return is_instance_of_numpy(number, kinds)
    return isinstance(number, kinds) or isinstance(STANDING_FOR[type(number)], kinds)


def _to_integer(value: Any) -> Callable[[Any], Any] | None:
    if issubclass(type(value), ReadInt):
        return taken
    if is_host_number(value):
        return _integer_part
    if type(value) is ReadFloat or type(value) is ReadBool:
        return _integer_of_float
    return _integer_of_tensor if is_number(value) else None


def _integer_part(number: Any) -> Any:
    return number.taken_here() if type(number.value) is int else record(int, number)


def _integer_of_float(number: Any) -> Any:
    """`int()` of a traced float or bool."""
    if type(number) is ReadBool:
        return taken(number.as_integer())
    return taken(record(int, number))


def _integer_of_tensor(tensor: torch.Tensor) -> Any:
    number: Any = integers_of(tensor).item()
    return _integer_of_float(number) if tensor.is_floating_point() else taken(number)
