"""Elementwise operators without a rule of their own, evaluated on each run of elements.

Such an operator (`addcdiv`, `lerp`, `_fused_adamw`, …) may round an element differently in the
last, incomplete vector of a tensor. So an element is identified by the operator, its operands, and
whether it lies behind the last multiple of 64 elements. With several threads and large tensors this
does not hold for SGD, RMSprop and ASGD in bfloat16, whose kernels begin a vector where a thread
begins (docs/sharding.md). It is assumed only where a sharded step is compared with that of one
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.operators import is_operator, is_pointwise
from graphopt.ir.operators.table import row
from graphopt.ir.rows import ALIGNED
from graphopt.verify.values.elementwise import ComputedElement, computed_of_runs
from graphopt.verify.values.terms import (
    Segment,
    TensorValue,
    Terms,
    canonical,
    elements,
    tensor_value,
)

_REDUCING = ("aten::_foreach_max", "aten::_foreach_powsum")


def evaluate_runs(terms: Terms, target: Any, arguments: dict[str, Any], fake: Any) -> Any:
    """Evaluates an elementwise operator on each run of consecutive elements. None for others, and
    if an operand's layout differs from the result's."""
    if not isinstance(target, _compat.OpOverload) or row(target).random:
        return None
    if is_operator(target, "aten::linalg_vector_norm"):
        return _norm(terms, arguments, fake)
    if not is_pointwise(target) or row(target).writes:
        return None
    return _computed(terms, str(target), arguments, fake)


def evaluate_entry_runs(
    terms: Terms, target: Any, arguments: dict[str, Any], fakes: Sequence[Any]
) -> list[Any] | None:
    """Evaluates one entry of a list operator on each run of consecutive elements, with a value for
    each list of results."""
    if is_operator(target, *_REDUCING):
        return None
    if is_operator(target, "aten::_foreach_norm"):
        value = _norm(terms, arguments, fakes[0])
        return None if value is None else [value]
    found = [
        None if fake is None else _computed(terms, f"{target} {number}", arguments, fake)
        for number, fake in enumerate(fakes)
    ]
    pairs = zip(found, fakes, strict=True)
    return None if any(value is None and fake is not None for value, fake in pairs) else found


def _computed(terms: Terms, name: str, arguments: dict[str, Any], fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor) or not fake.is_contiguous() or not fake.dim():
        return None
    if _compat.has_symbolic_shape(fake):
        return None
    given: dict[str, Any] = {}
    for key, value in arguments.items():
        if not isinstance(value, TensorValue):
            given[key] = value
        elif _is_number(value):
            given[key] = ("number", canonical(value))
        elif tuple(value.shape) == tuple(fake.shape) and value.stride == fake.stride():
            given[key] = value
        else:
            return None
    rows = [value.segments for value in given.values() if isinstance(value, TensorValue)]
    if not rows or not fake.numel():
        return None
    body = fake.numel() - fake.numel() % ALIGNED
    kind = f"{fake.dtype} on {fake.device.type}"
    found: list[Segment] = []
    for where, start, length in (("", 0, body), (" in the rest", body, fake.numel() - body)):
        computed = ComputedElement(name + where, given, kind, commutes=False)
        parts = [terms.part(each, start, length) for each in rows]
        found += computed_of_runs(terms, computed, parts)
    return tensor_value(terms.segments(found), fake)


def _is_number(value: TensorValue) -> bool:
    return tuple(value.shape) in ((), (1,))


def _norm(terms: Terms, arguments: dict[str, Any], fake: Any) -> Any:
    """Returns the norm of all elements, independent of their order and of zeros."""
    value, *others = arguments.values()
    if not isinstance(value, TensorValue) or not value.is_static or elements(fake.shape) != 1:
        return None
    segments = sorted(s for s in value.segments if not _is_zero(terms, s.term))
    key = ("norm", canonical(others), str(value.dtype), terms.segments(segments))
    return tensor_value([Segment(terms.make(key), 0, prod(fake.shape))], fake)


def _is_zero(terms: Terms, term: int) -> bool:
    key = terms[term].key
    return bool(key[0] == "fill" and "0x0.0p+0" in str(key[1]))
