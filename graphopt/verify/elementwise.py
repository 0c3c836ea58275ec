"""What operators and collectives do that treat each element for itself, run by run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt.verify.arrangements import arranged_alike
from graphopt.verify.terms import (
    Segment,
    TensorValue,
    Terms,
    canonical,
    elements_of,
    tensor_value,
)

Arguments = dict[str, Any]
"""Arguments of a call by name."""


def is_static(value: Any) -> bool:
    """Whether a value is a tensor all sizes of which are numbers."""
    return isinstance(value, TensorValue) and value.is_static


def elementwise(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    """The operator on each run of elements that stands in one segment of every operand."""
    operands = [value for value in args.values() if isinstance(value, TensorValue)]
    if not operands or not all(is_static(v) and v.shape == tuple(fake.shape) for v in operands):
        return None
    if canonical(args.get("alpha", 1)) != 1 or args.get("rounding_mode") is not None:
        return None
    if any(value.dtype.is_complex for value in operands):
        return None
    device = {value.device for value in operands}
    if device != {str(fake.device)}:
        return None
    rows = [value.segments if fake.numel() else () for value in operands]
    return tensor_value(_each(terms, target, args, rows, fake.dtype), fake)


def _each(
    terms: Terms,
    target: Any,
    args: Arguments,
    rows: Sequence[Sequence[Segment]],
    dtype: torch.dtype,
) -> tuple[Segment, ...]:
    found = []
    for runs in _aligned(rows):
        arranged = arranged_alike(terms, runs)
        if arranged is None:
            found.append(_apply_to_runs(terms, target, args, runs, dtype))
            continue
        key = ("each", str(target), str(dtype), *_shown(args, [(run.term,) for run in runs]))
        row = terms.rearranged.get(key)
        if row is None:
            groups, rebuild = arranged
            parts = [_each(terms, target, args, rows_of_part, dtype) for rows_of_part in groups]
            row = terms.rearranged[key] = rebuild(parts)
        found += terms.part(row, runs[0].start, runs[0].length)
    return terms.segments(found)


def _shown(args: Arguments, operands: Sequence[tuple[int, ...]]) -> list[Any]:
    """Arguments as parts of a key.

    Args:
        operands: the term that stands for each tensor, and where it is read, if that is to be said.
    """
    remaining = iter(operands)
    shown: list[Any] = []
    for name, value in args.items():
        if isinstance(value, TensorValue):
            term, *place = next(remaining)
            shown.append((name, (*elements_of(term), str(value.dtype), *place)))
        else:
            shown.append((name, canonical(value)))
    return shown


def _apply_to_runs(
    terms: Terms, target: Any, args: Arguments, runs: Sequence[Segment], dtype: torch.dtype
) -> Segment:
    """One term for whole terms of the operands where their ranges agree, so that an element has
    the same term however tensors are cut."""
    uniform = [terms[run.term].uniform for run in runs]
    starts = {run.start for run, same in zip(runs, uniform, strict=True) if not same}
    together = len(starts) <= 1
    operands = [(run.term,) if together else tuple(run) for run in runs]
    key = ("each", str(target), str(dtype), *_shown(args, operands))
    twice = _negated(terms, key)
    if twice is not None:
        return Segment(twice, runs[0].start, runs[0].length)
    constant = all(terms[run.term].constant for run in runs)
    term = terms.make(key, uniform=all(uniform), constant=constant)
    start = starts.pop() if together and starts else 0
    return Segment(term, start, runs[0].length)


def _negated(terms: Terms, key: tuple[Any, ...]) -> int | None:
    """What a negation negates, if that is a negation: it changes one bit, and back."""
    operand = key[3][1]
    if key[1] != "aten.neg.default" or len(operand) != 3:
        return None
    inner = terms[operand[1]].key
    if inner[:3] != key[:3] or len(inner[3][1]) != 3:
        return None
    return int(inner[3][1][1])


def _aligned(rows: Sequence[Sequence[Segment]]) -> Iterator[list[Segment]]:
    """Rows of equal length cut at all of their boundaries."""
    positions = [(0, 0) for _ in rows]
    while rows and positions[0][0] < len(rows[0]):
        length = min(
            row[index].length - offset for row, (index, offset) in zip(rows, positions, strict=True)
        )
        yield [
            Segment(row[index].term, row[index].start + offset, length)
            for row, (index, offset) in zip(rows, positions, strict=True)
        ]
        positions = [
            (index + 1, 0) if offset + length == row[index].length else (index, offset + length)
            for row, (index, offset) in zip(rows, positions, strict=True)
        ]


def reduced(terms: Terms, key: tuple[Any, ...], value: TensorValue, fake: Any) -> TensorValue:
    """An elementwise collective on every segment of what is sent."""
    found = [
        Segment(terms.make((*key, str(value.dtype), elements_of(s.term))), s.start, s.length)
        for s in value.segments
    ]
    return tensor_value(terms.segments(found), fake)
