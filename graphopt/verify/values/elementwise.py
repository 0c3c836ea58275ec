"""Symbolic values of elementwise operators and collectives, one run of elements at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.verify.values.arrangements import arranged_alike
from graphopt.verify.values.terms import (
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
    """True if a value is a tensor whose sizes are all plain numbers."""
    return isinstance(value, TensorValue) and value.is_static


BY_ELEMENT = tuple(
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "relu", "sign"),
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "bitwise_and", "bitwise_or"),
        *("bitwise_not", "logical_and", "logical_or", "logical_not"),
    )
)
"""Operators that give the same bits for an element wherever it stands in a tensor."""


class ComputedElement(NamedTuple):
    """The computation of one element by an elementwise operator.

    Attributes:
        name: the operator's name. A number as an operand stands for a tensor of that number.
        args: the arguments by name; tensors count by their dtype alone.
        kind: the result's dtype and device type: different devices are never equal.
        commutes: True if both operands may be swapped.
    """

    name: str
    args: Arguments
    kind: str
    commutes: bool

    def key(self, operands: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """Returns the key of the resulting term.

        Args:
            operands: for each tensor operand its term, and its offset relative to the first
                operand, if any.
        """
        remaining = iter(operands)
        shown: list[Any] = []
        for name, value in self.args.items():
            if isinstance(value, TensorValue):
                term, *place = next(remaining)
                shown.append((name, (*elements_of(term), str(value.dtype), *place)))
            else:
                shown.append((name, canonical(value)))
        return ("each", self.name, self.kind, *shown)


def elementwise(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    """Evaluates an operator on each run of elements that lies in one segment of every operand."""
    operands = [value for value in args.values() if isinstance(value, TensorValue)]
    if not isinstance(fake, torch.Tensor) or not operands:
        return None
    if not all(is_static(v) and v.shape == tuple(fake.shape) for v in operands):
        return None
    if canonical(args.get("alpha", 1)) != 1 or args.get("rounding_mode") is not None:
        return None
    dtypes = [value.dtype for value in operands]
    if any(dtype.is_complex for dtype in dtypes) or _mixes_halves(dtypes):
        return None
    device = str(fake.device)
    if any(value.device != device for value in operands):
        return None
    name = _compat.operator_name(target).replace("::", ".")
    alike = len(dtypes) == 2 and len(set(dtypes)) == 1
    kind = f"{fake.dtype} on {device.partition(':')[0]}"
    given = {key: value for key, value in args.items() if key not in _NEUTRAL}
    computed = ComputedElement(name, given, kind, commutes=alike and name in _COMMUTING)
    rows = [value.segments if fake.numel() else () for value in operands]
    return tensor_value(each(terms, computed, rows), fake)


_NEUTRAL = ("alpha", "rounding_mode")
"""Arguments without effect where the rule holds, and which not all overloads have."""

_COMMUTING = {
    f"aten.{name}"
    for name in ("add", "mul", "eq", "ne", "bitwise_and", "bitwise_or", "logical_and", "logical_or")
}


def _mixes_halves(dtypes: Sequence[torch.dtype]) -> bool:
    """True if half-precision operands meet others, where kernels round single elements
    differently."""
    return len(set(dtypes)) > 1 and any(d.is_floating_point and d.itemsize < 4 for d in dtypes)


def each(
    terms: Terms, computed: ComputedElement, rows: Sequence[Sequence[Segment]]
) -> tuple[Segment, ...]:
    """Evaluates an elementwise computation on rows of equal length, one row for each operand."""
    found = []
    for runs in aligned(rows):
        arranged = arranged_alike(terms, runs)
        if arranged is None:
            found.append(_apply_to_runs(terms, computed, runs))
            continue
        key = computed.key([(run.term,) for run in runs])
        row = terms.rearranged.get(key)
        if row is None:
            groups, rebuild = arranged
            parts = [each(terms, computed, rows_of_part) for rows_of_part in groups]
            row = terms.rearranged[key] = rebuild(parts)
        found += terms.part(row, runs[0].start, runs[0].length)
    return terms.segments(found)


def computed_of_runs(
    terms: Terms, computed: ComputedElement, rows: Sequence[Sequence[Segment]]
) -> list[Segment]:
    """Evaluates like `each`, but does not undo rearrangements of the operands."""
    return [_apply_to_runs(terms, computed, runs) for runs in aligned(rows)]


def _apply_to_runs(terms: Terms, computed: ComputedElement, runs: Sequence[Segment]) -> Segment:
    """Returns the result for one run. Its term covers the operands' whole terms, so an element has
    the same term however tensors are cut."""
    if computed.commutes and runs[1] < runs[0]:
        runs = [runs[1], runs[0]]
    uniform = [terms[run.term].uniform for run in runs]
    start = next((run.start for run, same in zip(runs, uniform, strict=True) if not same), 0)
    operands = [
        (run.term,) if same or run.start == start else (run.term, run.start - start)
        for run, same in zip(runs, uniform, strict=True)
    ]
    key = computed.key(operands)
    twice = _negated(terms, key)
    if twice is not None:
        return Segment(twice, start, runs[0].length)
    constant = all(terms[run.term].constant for run in runs)
    term = terms.make(key, uniform=all(uniform), constant=constant)
    return Segment(term, start, runs[0].length)


def _negated(terms: Terms, key: tuple[Any, ...]) -> int | None:
    """Returns the operand `x` of `-(-x)`, or None: a negation flips only the sign bit."""
    operand = key[3][1]
    if key[1] != "aten.neg" or len(operand) != 3:
        return None
    inner = terms[operand[1]].key
    if inner[:3] != key[:3] or len(inner[3][1]) != 3:
        return None
    return int(inner[3][1][1])


def aligned(rows: Sequence[Sequence[Segment]]) -> Iterator[list[Segment]]:
    """Cuts rows at the union of their segment boundaries, up to the end of the shortest."""
    rest = [list(reversed(row)) for row in rows]
    while rows and all(rest):
        runs = [row.pop() for row in rest]
        length = min(run.length for run in runs)
        for row, (term, start, whole) in zip(rest, runs, strict=True):
            if whole > length:
                row.append(Segment(term, start + length, whole - length))
        yield [Segment(term, start, length) for term, start, _ in runs]


def reduced(terms: Terms, key: tuple[Any, ...], value: TensorValue, fake: Any) -> TensorValue:
    """Evaluates an elementwise collective on every segment of the value it sends."""
    how = (*key, str(value.dtype), value.device)
    return tensor_value(_reduced(terms, how, value.segments), fake)


def _reduced(terms: Terms, key: tuple[Any, ...], row: Sequence[Segment]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for run in row:
        term = (*key, elements_of(run.term))
        arranged = arranged_alike(terms, [run])
        parts = [part for (part,) in arranged[0]] if arranged else []
        # what other ranks send where this one sends a constant is known by the whole that is sent
        if arranged is None or any(terms[s.term].constant for part in parts for s in part):
            found.append(Segment(terms.make(term), run.start, run.length))
            continue
        known = terms.rearranged.get(term)
        if known is None:
            rebuild = arranged[1]
            parts = [_reduced(terms, key, part) for part in parts]
            known = terms.rearranged[term] = rebuild(parts)
        found += terms.part(known, run.start, run.length)
    return terms.segments(found)
