"""`type`, `isinstance` and `hasattr` on traced values, answered as in eager code.

    if type(value) is torch.Tensor:     true, as in eager code
        value = value.item()
    if type(value) == float:            true as well

What stands for a tensor or a number in a trace is of another class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.scalars.functions import numpy_float64
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.numbers import (
    ReadBool,
    ReadFloat,
    ReadInt,
    TakenInt,
    may_be_of_numpy,
    refusal,
)

STANDING_FOR: dict[type, Any] = {ReadFloat: 0.0, ReadInt: 0, TakenInt: 0, ReadBool: False}
"""Classes of numbers that were read, each with a number of the class that it stands for."""


def class_of_number(value: Any) -> type:
    """The class of a traced number in eager code.

    Raises:
        CaptureError: it may be another one in each call.
    """
    if is_host_number(value):
        return type(value.value)
    if may_be_of_numpy(value):
        raise _of_numpy()
    return type(STANDING_FOR[type(value)])


def is_instance_of_numpy(number: Any, kinds: Any) -> bool:
    """`isinstance` for a traced number that may be a numpy scalar."""
    answers = [isinstance(each, kinds) for each in (numpy_float64(0.0), 0.0)]
    if answers[0] != answers[1]:
        raise _of_numpy()
    return answers[0]


def _of_numpy() -> CaptureError:
    return refusal(
        "it asks whether a number that it computes from one of numpy's is one itself",
        "ask isinstance(number, float), or take float(number) first",
    )


def has_attribute(value: Any, name: str) -> bool:
    """`hasattr` for a traced number, as in eager code."""
    if type(value) in STANDING_FOR:
        answers = {hasattr(kind, name) for kind in _kinds_of_numbers()}
        if len(answers) == 1:
            return answers.pop()
    return hasattr(class_of_number(value), name)


def _kinds_of_numbers() -> list[type]:
    numpy = sys.modules.get("numpy")
    of_numpy = [] if numpy is None else [numpy.bool_, numpy.int64, numpy.float32, numpy.float64]
    return [bool, int, float, *of_numpy]


def is_of_trace(value: Any) -> bool:
    return type(value) in STANDING_FOR or is_host_number(value)


def class_in_trace(value: Any, stands_for: Mapping[int, torch.Tensor]) -> type:
    """The class of a traced tensor or number in eager code.

    Args:
        stands_for: the tensors that have stand-ins, by the ids of these.
    """
    if not isinstance(value, torch.Tensor):
        return class_of_number(value)
    if id(value) in stands_for:
        return type(stands_for[id(value)])
    return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor


class ClassProxy:
    """An object whose `__class__` is that of another object."""

    def __init__(self, kind: type) -> None:
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_kind")


def asking(stands_for: Mapping[int, torch.Tensor], callee: Any, args: Sequence[Any]) -> Any:
    """The function to call in place of `type` and `hasattr` for traced values; None for other
    calls."""
    if callee is hasattr and len(args) == 2 and is_of_trace(args[0]):
        return has_attribute
    if callee is type and len(args) == 1 and (_compat.is_fake(args[0]) or is_of_trace(args[0])):
        return partial(class_in_trace, stands_for=stands_for)
    return None
