"""Traced forms of `math` functions, `max` and `min`, for numbers of the trace."""

from __future__ import annotations

import builtins
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, GeneratorType
from typing import Any

import torch

from graphopt.tracing.interception.replaced_functions import replaced
from graphopt.tracing.scalars.expressions import Condition
from graphopt.tracing.scalars.functions import CHOICES, MATH, ROUNDING, TESTS
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.number_of import float_of_tensor, is_number
from graphopt.tracing.scalars.numbers import ReadBool, ReadInt, TracedFloat, record

_TRUNC = math.trunc
_COLLECTIONS: tuple[Any, ...] = (
    *(list, tuple, set, frozenset, dict, deque, GeneratorType, map, filter, zip),
    *(type({}.keys()), type({}.values())),
)
"""What may be gone through once in place of what goes through it."""


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any) -> Any:
        if function is not _TRUNC:  # which tensors do not have
            args = tuple(map(_number_of, args))
        if function not in ROUNDING:  # the others take an integer for the same float
            args = tuple(
                torch.sym_float(arg) if issubclass(type(arg), ReadInt) else arg for arg in args
            )
        if any(map(_is_traced_float, args)):
            return record(function, *args)
        return function(*args)

    return traced


def _number_of(value: Any) -> Any:
    """Converts a one-element tensor to its number; other values unchanged."""
    return float_of_tensor(value) if is_number(value) else value


def _traced_choice(choose: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], _COLLECTIONS):
            args = (tuple[Any, ...](args[0]),)
        found = args[0] if len(args) == 1 and type(args[0]) is tuple else args
        if len(found) > 1 and options.keys() <= {"default"} and _are_traced(found):
            return record(choose, *found)
        return choose(*args, **options)

    return traced


def _are_traced(values: Sequence[Any]) -> bool:
    """True if values are all floats or all integers, and one is traced."""
    return any(map(_is_traced_float, values)) and _are_alike(values)


def _traced_test(test: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a test such as `math.isnan` so that it also takes traced numbers."""

    def traced(value: Any, *args: Any, **options: Any) -> Any:
        if original is test:
            value = _number_of(value)
        if is_host_number(value):
            value.conditions.add(Condition(_answers, test, value.expression, test(value.value)))
            return test(value.value)
        if issubclass(type(value), (ReadInt, ReadBool)):
            return test(0)
        if _is_traced_float(value):
            return bool(record(test, value) == 1.0)
        return original(value, *args, **options)

    return traced


def _answers(test: Callable[[Any], bool], value: Any) -> bool:
    return test(value)


def _is_traced_float(value: Any) -> bool:
    return issubclass(type(value), TracedFloat)


def _are_alike(values: Sequence[Any]) -> bool:
    """True if values are floats in each call, or integers in each call."""
    kinds = set(map(_kind, values))
    return len(kinds) == 1 and None not in kinds


def _kind(value: Any) -> type | None:
    kind = type(value.value) if is_host_number(value) else type(value)
    if kind in (int, float):
        return kind
    return float if _is_traced_float(value) and not is_host_number(value) else None


def traced_form(callee: Any) -> Callable[..., Any] | None:
    """The traced form of a number function, whatever name the step calls it by (`from math import
    cos`); None for other functions."""
    return _FORMS.get(callee) if type(callee) is BuiltinFunctionType else None


def is_choice(callee: Any) -> bool:
    """True if a callee is `max` or `min`, which may take a list."""
    return any(callee is each for each in CHOICES)


_FORMS: dict[Any, Callable[..., Any]] = {
    **{f: _traced(f) for f in (*MATH, *ROUNDING)},
    **{f: _traced_choice(f) for f in CHOICES},
    **{f: _traced_test(f, f) for f in TESTS},
}


@contextmanager
def traced_math() -> Iterator[None]:
    """While active, functions of `math`, `max` and `min` on traced numbers become nodes."""
    numpy = sys.modules.get("numpy")
    of_numpy = [] if numpy is None else [(numpy, f, getattr(numpy, f.__name__)) for f in TESTS]
    with replaced(
        *((math, f.__name__, _traced(f)) for f in dict.fromkeys((*MATH, *ROUNDING))),
        *((math, f.__name__, _traced_test(f, f)) for f in TESTS),
        *((module, f.__name__, _traced_test(f, former)) for module, f, former in of_numpy),
        *((builtins, f.__name__, _traced_choice(f)) for f in CHOICES),
    ):
        yield
