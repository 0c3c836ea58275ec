"""The rules by which two computations count as one, as data.

Each rule says what operators do to the elements of tensors, under a condition, and why that holds
bit for bit. An operator without a rule, or outside a rule's condition, is an uninterpreted function
of all of its arguments, layouts included: it is the same only where it gets the very same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.verify.terms import (
    Segment,
    TensorValue,
    Terms,
    canonical,
    elements,
    elements_of,
    tensor_value,
)

Arguments = dict[str, Any]
Apply = Callable[[Terms, Any, Arguments, Any], Any]
"""(terms, operator, arguments by name, fake result) -> values, or None outside the condition."""


@dataclass(frozen=True)
class Axiom:
    """One rule.

    Attributes:
        name: as reports and docs/verification.md have it.
        operators: names of the operators that it is about.
        why: why it holds bit for bit.
        apply: the value of a call, None where the condition does not hold.
        speaks_of: the arguments that it takes into account, by name, layouts of the result
            included; outside its condition is a call that gives another one. None: all.
    """

    name: str
    operators: tuple[str, ...]
    why: str
    apply: Apply
    speaks_of: frozenset[str] | None = None

    def value(self, terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
        """The value of a call; None outside the condition."""
        known = args if self.speaks_of is None else self.speaks_of
        for name, given in args.items():
            if name not in known and not _is_usual(given):
                return None
        return self.apply(terms, target, args, fake) if _has_sizes(fake) else None


def _is_usual(value: Any) -> bool:
    """Whether an option such as `pin_memory`, `non_blocking` or `layout` means nothing special."""
    return value is None or value is False or value is torch.strided


def _has_sizes(fake: Any) -> bool:
    """Whether the sizes of a result are numbers: rules compute with them."""
    if isinstance(fake, torch.Tensor):
        return not _compat.has_symbolic_shape(fake)
    return not any(map(_compat.has_symbolic_shape, tensors_in(fake)))


def _same_elements(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = next(iter(args.values()))
    if not _is_static(source) or elements(source.shape) != fake.numel():
        return None
    if target._schema.name == "aten::view" and "dtype" in args:
        return None  # it reads the same bits as numbers of another kind
    return tensor_value(_cast(terms, source.segments, source.dtype, fake.dtype), fake)


def _cast(
    terms: Terms, segments: Sequence[Segment], before: torch.dtype, after: torch.dtype
) -> tuple[Segment, ...]:
    if before == after:
        return tuple(segments)
    cast = ("cast", str(before), str(after))
    return terms.segments(
        Segment(
            terms.make(
                (*cast, elements_of(s.term)),
                uniform=terms[s.term].uniform,
                constant=terms[s.term].constant,
            ),
            s.start,
            s.length,
        )
        for s in segments
    )


def _permuted(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["self"]
    if not _is_static(source):
        return None
    order = _order(target._schema.name, args, len(source.shape))
    base, shape, before = source.segments, source.shape, tuple(range(len(order)))
    inner = _single_permutation(terms, source)
    if inner is not None:
        base, shape, before = inner
    net = tuple(before[i] for i in order)
    if [i for i in net if shape[i] != 1] == [i for i in range(len(shape)) if shape[i] != 1]:
        return tensor_value(base, fake)
    term = terms.make(("permute", base, shape, net))
    return tensor_value((Segment(term, 0, fake.numel()),), fake)


def _single_permutation(terms: Terms, source: TensorValue) -> tuple[Any, Any, Any] | None:
    """What `source` is a permutation of, if it is one as a whole and in its own shape."""
    if len(source.segments) != 1 or source.segments[0].length != elements(source.shape):
        return None
    key = terms[source.segments[0].term].key
    if key[0] != "permute" or source.segments[0].start:
        return None
    _, base, shape, order = key
    return (base, shape, order) if tuple(shape[i] for i in order) == source.shape else None


def permuted_back(
    terms: Terms, part: Any, value: TensorValue
) -> tuple[TensorValue, TensorValue] | None:
    """What `part` is a permutation of, and `value` permuted back in the same way."""
    inner = _single_permutation(terms, part) if isinstance(part, TensorValue) else None
    if inner is None:
        return None
    base, shape, order = inner
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    found = value.segments
    undone = _single_permutation(terms, value)
    if undone is not None and undone[1:] == (shape, order):
        found = undone[0]
    else:
        key = ("permute", found, value.shape, back)
        found = (Segment(terms.make(key), 0, elements(shape)),)
    layout = (shape, (), value.dtype, value.device)
    return TensorValue(tuple(base), *layout), TensorValue(tuple(found), *layout)


def _order(name: str, args: Arguments, rank: int) -> tuple[int, ...]:
    if name == "aten::permute":
        return tuple(dim % rank for dim in args["dims"])
    order = list(range(rank))
    first, second = (0, -1) if name == "aten::t" else (args["dim0"], args["dim1"])
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _slice(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["self"]
    if not _is_static(source) or not source.shape:
        return None
    dim = args["dim"] % len(source.shape)
    size = source.shape[dim]
    start = args["index"] if target._schema.name == "aten::select" else args["start"] or 0
    if not isinstance(start, int) or args.get("step", 1) != 1:
        return None
    if elements(source.shape[:dim]) != 1:
        return None
    start = min(max(start + size if start < 0 else start, 0), size)
    inner = elements(source.shape[dim + 1 :])
    return tensor_value(terms.part(source.segments, start * inner, fake.numel()), fake)


def _split(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["self"]
    if not _is_static(source) or not source.shape:
        return None
    if elements(source.shape[: args["dim"] % len(source.shape)]) != 1:
        return None
    parts, start = [], 0
    for piece in fake:
        parts.append(tensor_value(terms.part(source.segments, start, piece.numel()), piece))
        start += piece.numel()
    return tuple(parts)


def _cat(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    sources = args["tensors"]
    rank = fake.dim()
    if not all(_is_static(source) and source.dtype == fake.dtype for source in sources):
        return None
    dim = args["dim"] % rank if rank else 0
    if elements(tuple(fake.shape[:dim])) != 1:
        return None
    return tensor_value(terms.segments(s for source in sources for s in source.segments), fake)


def _filled(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    fixed = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
    value = fixed.get(
        target._schema.name.removeprefix("aten::"), args.get("fill_value", args.get("s"))
    )
    if not isinstance(value, (bool, int, float)) or _compat.has_symbolic_shape(fake):
        return None
    number = float(value) if fake.dtype.is_floating_point else value
    term = terms.make(("fill", canonical(number), str(fake.dtype)), uniform=True)
    return tensor_value(terms.segments([Segment(term, 0, fake.numel())]), fake)


def _uninitialised(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    term = terms.make(("undefined", str(fake.dtype)), uniform=True)
    return tensor_value(terms.segments([Segment(term, 0, fake.numel())]), fake)


def _elementwise(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    """The operator on each run of elements that stands in one segment of every operand."""
    operands = [value for value in args.values() if isinstance(value, TensorValue)]
    if not operands or not all(_is_static(v) and v.shape == tuple(fake.shape) for v in operands):
        return None
    if canonical(args.get("alpha", 1)) != 1 or args.get("rounding_mode") is not None:
        return None
    if any(value.dtype.is_complex for value in operands):
        return None
    device = {value.device for value in operands}
    if device != {str(fake.device)}:
        return None
    return tensor_value(
        _each(terms, target, args, [value.segments for value in operands], fake.dtype), fake
    )


def _each(
    terms: Terms,
    target: Any,
    args: Arguments,
    rows: Sequence[Sequence[Segment]],
    dtype: torch.dtype,
) -> tuple[Segment, ...]:
    found = []
    for runs in _aligned(rows):
        inner = _same_permutation(terms, runs)
        if inner is None:
            found.append(_apply_to_runs(terms, target, args, runs, dtype))
            continue
        bases, shape, order = inner
        base = _each(terms, target, args, bases, dtype)
        term = terms.make(("permute", base, shape, order))
        found.append(Segment(term, runs[0].start, runs[0].length))
    return terms.segments(found)


def _same_permutation(terms: Terms, runs: Sequence[Segment]) -> tuple[Any, Any, Any] | None:
    """What is permuted alike in all operands, of which the same elements are taken: an operator on
    each element may come before it."""
    keys = [terms[run.term].key for run in runs]
    alike = all(key[0] == "permute" and key[2:] == keys[0][2:] for key in keys)
    if not alike or any(run.start != runs[0].start for run in runs):
        return None
    return [key[1] for key in keys], keys[0][2], keys[0][3]


def _apply_to_runs(
    terms: Terms, target: Any, args: Arguments, runs: Sequence[Segment], dtype: torch.dtype
) -> Segment:
    """One term for whole terms of the operands where their ranges agree, so that an element has
    the same term however tensors are cut."""
    uniform = [terms[run.term].uniform for run in runs]
    starts = {run.start for run, same in zip(runs, uniform, strict=True) if not same}
    together = len(starts) <= 1
    remaining = iter(runs)
    shown: list[Any] = []
    for name, value in args.items():
        if isinstance(value, TensorValue):
            run = next(remaining)
            entry: Any = (*elements_of(run.term), str(value.dtype))
            shown.append((name, entry if together else (*entry, run.start, run.length)))
        else:
            shown.append((name, canonical(value)))
    key = ("each", str(target), str(dtype), *shown)
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


def _is_static(value: Any) -> bool:
    return isinstance(value, TensorValue) and value.is_static


def _aten(*names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


AXIOMS = (
    Axiom(
        "same elements",
        _aten(
            "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
            "expand", "alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh_copy",
        ),
        "they copy or rename elements in row-major order; a cast rounds each element for itself",
        _same_elements,
        _names("self input size sizes shape dim start_dim end_dim implicit")
        | _names("memory_format dtype device"),
    ),
    Axiom(
        "permutations compose",
        _aten("permute", "t", "transpose"),
        "they rename indices; dimensions of size 1 do not change the order of elements",
        _permuted,
        _names("self dims dim0 dim1"),
    ),
    Axiom(
        "slices are ranges",
        _aten("slice", "select", "narrow"),
        "with step 1 and behind dimensions of size 1 only, a slice is a run of elements",
        _slice,
        _names("self dim start end step index length"),
    ),
    Axiom(
        "splits are ranges",
        _aten("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk",
              "unsafe_split_with_sizes", "split_with_sizes_copy"),
        "behind dimensions of size 1 only, parts are consecutive runs of elements",
        _split,
        _names("self dim split_size split_sizes chunks sections"),
    ),
    Axiom(
        "cat joins ranges",
        _aten("cat", "stack"),
        "behind dimensions of size 1 only, and in one dtype, elements follow one another",
        _cat,
        _names("tensors dim"),
    ),
    Axiom(
        "constants",
        _aten("zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like", "full",
              "new_full", "full_like", "scalar_tensor"),
        "all elements are one number",
        _filled,
        _names("self size fill_value s dtype device memory_format"),
    ),
    Axiom(
        "uninitialised memory",
        _aten("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        "what it holds is undefined, so that no result that is defined depends on it",
        _uninitialised,
        _names("self size stride dtype device memory_format"),
    ),
    Axiom(
        "elementwise by runs",
        _aten("add", "sub", "mul", "div", "neg", "abs", "sqrt", "reciprocal",
              "relu", "sign", "eq", "ne", "lt", "le", "gt", "ge", "where", "bitwise_and",
              "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not"),
        "IEEE 754 rounds each of these correctly, so that an element has the same bits in whatever"
        " loop, vector or remainder it is computed; exp or tanh do not, nor does alpha * b + a, nor"
        " complex numbers, nor a quotient made whole; the larger of 0.0 and -0.0 is either",
        _elementwise,
    ),
)  # fmt: skip

RULES: dict[str, Axiom] = {name: axiom for axiom in AXIOMS for name in axiom.operators}
