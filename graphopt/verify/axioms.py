"""The rules by which two computations count as one, as data.

Each rule says what operators do to the elements of tensors, under a condition, and why that holds
bit for bit. An operator without a rule, or outside a rule's condition, is an uninterpreted function
of all of its arguments, layouts included: it is the same only where it gets the very same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.verify.elementwise import Arguments, elementwise, is_static
from graphopt.verify.terms import (
    ScalarValue,
    Segment,
    TensorValue,
    Terms,
    canonical,
    elements,
    elements_of,
    tensor_value,
)

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
            included; outside its condition is a call that gives another one, or a size or position
            that depends on values. None: all, which are operands.
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
            if self.speaks_of is not None and _is_by_value(given):
                return None
        return self.apply(terms, target, args, fake) if _has_sizes(fake) else None


def _is_usual(value: Any) -> bool:
    """Whether an option such as `pin_memory`, `non_blocking` or `layout` means nothing special."""
    return value is None or value is False or value is torch.strided


def _is_by_value(given: Any) -> bool:
    """Whether an argument is a number that the graph computes, or has one among its entries."""
    if type(given) is tuple:
        return any(type(entry) is ScalarValue for entry in given)
    return type(given) is ScalarValue


def _has_sizes(fake: Any) -> bool:
    """Whether the sizes of a result are numbers: rules compute with them."""
    if isinstance(fake, torch.Tensor):
        return not _compat.has_symbolic_shape(fake)
    return not any(map(_compat.has_symbolic_shape, tensors_in(fake)))


def _same_elements(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = next(iter(args.values()))
    if not is_static(source) or elements(source.shape) != fake.numel():
        return None
    if target._schema.name == "aten::view" and "dtype" in args:
        return None  # it reads the same bits as numbers of another kind
    return tensor_value(cast_segments(terms, source.segments, source.dtype, fake.dtype), fake)


def cast_segments(
    terms: Terms, segments: Sequence[Segment], before: torch.dtype, after: torch.dtype
) -> tuple[Segment, ...]:
    """Elements in another dtype, each of which is rounded for itself."""
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
    if not is_static(source):
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
    inner = _permuted_elements(terms, source)
    if inner is None:
        return None
    _, shape, order = inner
    return inner if tuple(shape[i] for i in order) == source.shape else None


def _permuted_elements(terms: Terms, source: TensorValue) -> tuple[Any, Any, Any] | None:
    """What the row of all elements of `source` is a permutation of, whatever its own shape."""
    if len(source.segments) != 1 or not source.is_static:
        return None
    key = terms[source.segments[0].term].key
    if key[0] != "permute" or source.segments[0][1:] != (0, elements(key[2])):
        return None
    return key[1:]


def permuted_back(
    terms: Terms, part: Any, value: TensorValue
) -> tuple[TensorValue, TensorValue] | None:
    """What `part` is a permutation of, in whatever shape, and `value` permuted back in the same
    way."""
    inner = _permuted_elements(terms, part) if isinstance(part, TensorValue) else None
    if inner is None:
        return None
    base, shape, order = inner
    if sum(segment.length for segment in value.segments) != elements(shape):
        return None
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    undone = _permuted_elements(terms, value)
    if undone is not None and undone[1:] == (shape, order):
        found = undone[0]
    else:
        key = ("permute", value.segments, tuple(shape[i] for i in order), back)
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
    if not is_static(source) or not source.shape:
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
    if not is_static(source) or not source.shape:
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
    if not all(is_static(source) and source.dtype == fake.dtype for source in sources):
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
        elementwise,
    ),
)  # fmt: skip

RULES: dict[str, Axiom] = {name: axiom for axiom in AXIOMS for name in axiom.operators}
