"""Symbolic values of dtype conversions, and of tensors whose elements are all one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphopt.verify.values.arrangements import arranged_alike
from graphopt.verify.values.terms import Segment, TensorValue, Terms, canonical, elements_of


def converted(terms: Terms, source: TensorValue, like: torch.Tensor) -> tuple[Segment, ...]:
    """Returns elements converted to the dtype of `like`, each rounded by itself. Numbers too large
    for an integer dtype are device-dependent and therefore keyed by device."""
    before, after = source.dtype, like.dtype
    if before == after:
        return source.segments
    where = ""
    if not (after.is_floating_point or after.is_complex or after == torch.bool):
        where = "" if before in _WHOLE else f"from {source.device} to {like.device}"
    return _cast_row(terms, source.segments, (before, after, where))


_Cast = tuple[torch.dtype, torch.dtype, str]


def _cast_row(terms: Terms, segments: Sequence[Segment], cast: _Cast) -> tuple[Segment, ...]:
    if cast[0] == cast[1]:
        return tuple(segments)
    return terms.segments(part for s in segments for part in _cast(terms, s, cast))


def _cast(terms: Terms, run: Segment, cast: _Cast) -> Iterable[Segment]:
    before, after, where = cast
    key = ("cast", str(before), str(after), elements_of(run.term), where)
    arranged = arranged_alike(terms, [run])
    if arranged is not None:
        row = terms.rearranged.get(key)
        if row is None:
            groups, rebuild = arranged
            parts = [_cast_row(terms, part, cast) for (part,) in groups]
            row = terms.rearranged[key] = rebuild(parts)
        return terms.part(row, run.start, run.length)
    held = terms[run.term]
    number = _EXACT.get(held.key[1]) if held.key[0] == "fill" else None
    if number is not None and {before, after} <= _ORDINARY:
        return [Segment(fill(terms, number, after), 0, run.length)]
    if held.key[0] == "cast" and not where and not held.key[4]:
        first = _DTYPES.get(held.key[1])
        if first is not None and before in _WIDER.get(first, ()):
            return _cast_row(terms, [Segment(held.key[3][1], *run[1:])], (first, after, where))
    term = terms.make(key, uniform=held.uniform, constant=held.constant)
    return [Segment(term, run.start, run.length)]


_EXACT = {canonical(value): int(value) for value in (0, 1, 0.0, 1.0, False, True)}
"""Numbers that all ordinary dtypes represent exactly, as keys have them."""

_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

_ORDINARY = _WHOLE | {torch.float16, torch.bfloat16, torch.float32, torch.float64}

_WIDER = {
    torch.bool: _ORDINARY,
    torch.uint8: _ORDINARY - {torch.bool, torch.int8},
    torch.int8: _ORDINARY - {torch.bool, torch.uint8},
    torch.int16: {torch.int32, torch.int64, torch.float32, torch.float64},
    torch.int32: {torch.int64, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.bfloat16: {torch.float32, torch.float64},
}
"""For each dtype, those that represent all of its numbers, so that a cast does not round. float32
is excluded as a source: processors may be set to flush its smallest numbers."""

_DTYPES = {str(dtype): dtype for dtype in _ORDINARY}

_LARGEST_WHOLE = 2**53


def fill(terms: Terms, value: Any, dtype: torch.dtype) -> int:
    """Returns the term of a tensor of this dtype whose elements are all one number."""
    number = value
    if dtype.is_floating_point and abs(value) <= _LARGEST_WHOLE:
        number = float(value)  # a larger one is rounded twice, where it is made a float first
    if dtype == torch.bool:
        number = bool(value)
    return terms.make(("fill", canonical(number), str(dtype)), uniform=True)
