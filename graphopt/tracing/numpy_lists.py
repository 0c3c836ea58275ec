"""Functions of numpy's that are given a list of numbers which the step has read from tensors.

    np.mean([loss.item(), …])    a node that calls `numpy.mean` with the numbers of each call

Numpy itself would make an array of objects, and add these one by one, otherwise than floats.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.known_functions import MAKING_TENSORS, is_in
from graphopt.tracing.later_values import is_later
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.number_functions import OF_FLOATS_IN_NUMPY, numpy_float64
from graphopt.tracing.numbers import (
    SYMBOLIC,
    ReadFloat,
    TracedFloat,
    as_read,
    is_float_read,
    record,
    refusal,
)


def of_list(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in place of a function of numpy's; None where that is the function itself."""
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        return None
    numpy = sys.modules.get("numpy")
    name = getattr(callee, "__name__", None) if numpy is not None else None
    function: Any = OF_FLOATS_IN_NUMPY.get(name) if isinstance(name, str) else None
    if function is None or getattr(numpy, str(name), None) is not callee:
        return None
    if not all(map(_is_float, args[0])) or not any(map(_is_read, args[0])):
        return None

    def compute(numbers: Sequence[Any]) -> Any:
        found = as_read(_compat.record_number(function, tuple(numbers)))
        found.of_numpy = True
        found.item = functools.partial(record, float, as_read(found))
        return found

    return compute


def of_sequence(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What is called in place of a function or a class of torch's that makes a tensor of numbers
    that are not known in this trace; None where that is the function itself: the classes
    (`torch.FloatTensor`) take plain numbers alone, and no function takes a queue of others."""
    if len(args) == 0 or type(args[0]) not in (list, tuple, deque):
        return None
    legacy = _compat.made_by_legacy(callee)
    if legacy is None and not (type(args[0]) is deque and is_in(callee, MAKING_TENSORS)):
        return None
    is_unknown = _is_of_trace if legacy is None else is_float_read
    if not any(is_unknown(each) or is_later(each) for each in leaves_in(list(args[0]))):
        return None

    def make(sequence: Any, *others: Any, **options: Any) -> Any:
        if any(map(is_later, leaves_in(list(sequence)))):
            raise refusal(
                "it makes a tensor of what only Python computes, of a list outside that it changes",
                "let the list be one that the step makes, or compute with tensors",
            )
        if legacy is None:
            return callee(list(sequence), *others, **options)
        dtype, device = legacy
        return torch.tensor(list(sequence), dtype=dtype, device=device)

    return make


def _is_of_trace(value: Any) -> bool:
    return isinstance(value, SYMBOLIC)


def is_instance_of_numpy(number: Any, kinds: Any) -> bool:
    """`isinstance` of what numpy gives for a list, or of what is computed from it."""
    answers = [isinstance(each, kinds) for each in (numpy_float64(0.0), 0.0)]
    if answers[0] != answers[1] and not hasattr(number, "item"):
        raise refusal(
            "it asks whether a number that it computes from one of numpy's is one itself",
            "ask isinstance(number, float), or take float(number) first",
        )
    return answers[0]


def _is_float(value: Any) -> bool:
    if is_host_number(value):
        return type(value.value) is float
    return type(value) is float or issubclass(type(value), TracedFloat)


def _is_read(value: Any) -> bool:
    return type(value) is ReadFloat
