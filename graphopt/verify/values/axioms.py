"""The rules by which two computations count as equal, as data.

Each rule says what operators do to the elements of tensors, under a condition, and why that holds
bit for bit. An operator without a rule, or outside a rule's condition, is an uninterpreted function
of all of its arguments, layouts included: it is the same only where it gets the very same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.verify.values.arrangements import beside, columns, permutation_of, permuted, rows_of
from graphopt.verify.values.casts import converted, fill
from graphopt.verify.values.elementwise import (
    BY_ELEMENT,
    Arguments,
    ComputedElement,
    each,
    elementwise,
    is_static,
)
from graphopt.verify.values.terms import (
    ScalarValue,
    Segment,
    TensorValue,
    Terms,
    elements,
    tensor_value,
)

Apply = Callable[[Terms, Any, Arguments, Any], Any]
"""(terms, operator, arguments by name, fake result) -> values, or None outside the condition."""


@dataclass(frozen=True)
class Axiom:
    """One rule: what some operators do to the elements of tensors, and why that holds bit for bit.

    Attributes:
        name: the rule's name in reports and in docs/verification.md.
        operators: names of the operators that the rule covers.
        why: the reason why it holds bit for bit.
        apply: computes the value of a call, or None where the condition does not hold.
        speaks_of: names of the arguments that the rule takes into account. Calls with any other
            argument, or with sizes or positions that depend on values, are outside its condition.
            None: all arguments, which are operands.
    """

    name: str
    operators: tuple[str, ...]
    why: str
    apply: Apply
    speaks_of: frozenset[str] | None = None

    def value(self, terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
        """Returns the symbolic value of a call, or None outside the rule's condition."""
        known = args if self.speaks_of is None else self.speaks_of
        for name, given in args.items():
            if name not in known and not _is_usual(given):
                return None
            if self.speaks_of is not None and _is_by_value(given):
                return None
        return self.apply(terms, target, args, fake) if _has_sizes(fake) else None


def _is_usual(value: Any) -> bool:
    """True if an option such as `pin_memory`, `non_blocking` or `layout` has its default
    meaning."""
    return value is None or value is False or value is torch.strided


def _is_by_value(given: Any) -> bool:
    """True if an argument is, or contains, a number that the graph computes."""
    if type(given) is tuple:
        return any(type(entry) is ScalarValue for entry in given)
    return type(given) is ScalarValue


def _has_sizes(fake: Any) -> bool:
    """True if all sizes of a result are plain numbers, with which rules can compute."""
    if isinstance(fake, torch.Tensor):
        return not _compat.has_symbolic_shape(fake)
    return not any(map(_compat.has_symbolic_shape, tensors_in(fake)))


def _same_elements(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = next(iter(args.values()))
    if not is_static(source) or elements(source.shape) != fake.numel():
        return None
    if _compat.operator_name(target) in ("aten::view", "aten::view_copy") and "dtype" in args:
        return None  # it reads the same bits as numbers of another kind
    return tensor_value(converted(terms, source, fake), fake)


def _copied(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["src"]
    if not is_static(source) or tuple(source.shape) != tuple(fake.shape):
        return None
    return tensor_value(converted(terms, source, fake), fake)


def _permuted(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["self"]
    if not is_static(source):
        return None
    name = _compat.operator_name(target).removesuffix("_copy")
    order = _order(name, args, len(source.shape))
    return tensor_value(permuted(terms, source.segments, source.shape, order), fake)


def permuted_back(
    terms: Terms, part: Any, value: TensorValue
) -> tuple[TensorValue, TensorValue] | None:
    """Undoes on `value` the permutation that made `part`; returns the values (base, permuted
    back)."""
    inner = permutation_of(terms, part.segments) if isinstance(part, TensorValue) else None
    if inner is None:
        return None
    base, shape, order = inner
    if sum(segment.length for segment in value.segments) != elements(shape):
        return None
    back = sorted(range(len(order)), key=order.__getitem__)
    found = permuted(terms, value.segments, [shape[i] for i in order], back)
    layout = (shape, (), value.dtype, value.device)
    return TensorValue(base, *layout), TensorValue(found, *layout)


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
    start = args["index"] if "index" in args else args["start"] or 0
    if not isinstance(start, int) or args.get("step", 1) != 1:
        return None
    start = min(max(start + size if start < 0 else start, 0), size)
    place = start * elements(source.shape[dim + 1 :])
    return _columns(terms, source, elements(source.shape[:dim]), place, fake)


def _columns(terms: Terms, source: TensorValue, height: int, start: int, fake: Any) -> TensorValue:
    """Returns the slice that begins at column `start` of a tensor read as a matrix of `height`
    rows."""
    if not fake.numel():
        return tensor_value((), fake)
    if height == 1:
        return tensor_value(terms.part(source.segments, start, fake.numel()), fake)
    end = start + fake.numel() // height
    return tensor_value(columns(terms, source.segments, height, start, end), fake)


def _split(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    source = args["self"]
    if not is_static(source) or not source.shape:
        return None
    height = elements(source.shape[: args["dim"] % len(source.shape)])
    if height == 1:
        rows = terms.parts(source.segments, [piece.numel() for piece in fake])
        return tuple(map(tensor_value, rows, fake))
    parts, start = [], 0
    for piece in fake:
        parts.append(_columns(terms, source, height, start, piece))
        start += piece.numel() // max(height, 1)
    return tuple(parts)


def _cat(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    sources = args["tensors"]
    rank = fake.dim()
    if not all(is_static(source) and source.dtype == fake.dtype for source in sources):
        return None
    dim = args["dim"] % rank if rank else 0
    height = elements(tuple(fake.shape[:dim]))
    if height != 1 and fake.numel():
        return tensor_value(beside(terms, [s.segments for s in sources], height), fake)
    return tensor_value(terms.segments(s for source in sources for s in source.segments), fake)


def _filled(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    fixed = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
    value = fixed.get(
        _compat.operator_name(target).removeprefix("aten::"), args.get("fill_value", args.get("s"))
    )
    if not isinstance(value, (bool, int, float)) or _compat.has_symbolic_shape(fake):
        return None
    term = fill(terms, value, fake.dtype)
    return tensor_value(terms.segments([Segment(term, 0, fake.numel())]), fake)


def _uninitialised(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    term = terms.make(("undefined", str(fake.dtype)), uniform=True)
    return tensor_value(terms.segments([Segment(term, 0, fake.numel())]), fake)


def _summed(terms: Terms, target: Any, args: Arguments, fake: Any) -> Any:
    received, ranks = args["received"], args["ranks"]
    if not is_static(received) or not isinstance(ranks, int) or not fake.numel():
        return None
    rows = rows_of(terms, received.segments, ranks)
    named = {str(rank): received for rank in range(ranks)}
    kind = f"{fake.dtype} on {fake.device.type}"
    computed = ComputedElement("sum of ranks", named, kind, commutes=False)
    return tensor_value(each(terms, computed, rows), fake)


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
            "view_copy", "_reshape_copy", "squeeze_copy", "unsqueeze_copy", "expand_copy",
            "alias_copy", "detach_copy",
        ),
        "they copy or rename elements in row-major order; a cast rounds each element for itself,"
        " and leaves 0 and 1 what they are",
        _same_elements,
        _names("self input size sizes shape dim start_dim end_dim implicit")
        | _names("memory_format dtype device"),
    ),
    Axiom(
        "copies into a tensor",
        _aten("copy"),
        "nothing of what was there is left; a cast rounds each element for itself",
        _copied,
        _names("self src"),
    ),
    Axiom(
        "permutations compose",
        _aten("permute", "t", "transpose", "permute_copy", "t_copy", "transpose_copy"),
        "they rename indices; dimensions of size 1 do not change the order of elements",
        _permuted,
        _names("self dims dim0 dim1"),
    ),
    Axiom(
        "slices are ranges",
        _aten("slice", "select", "narrow", "slice_copy", "select_copy", "narrow_copy"),
        "with step 1, a slice is a run of elements of each row",
        _slice,
        _names("self dim start end step index length"),
    ),
    Axiom(
        "splits are ranges",
        _aten("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk",
              "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy", "unbind_copy"),
        "parts are consecutive runs of elements of each row",
        _split,
        _names("self dim split_size split_sizes chunks sections"),
    ),
    Axiom(
        "cat joins ranges",
        _aten("cat", "concat", "stack"),
        "in one dtype, elements of each row follow one another",
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
        "sums in rank order by runs",
        ("graphopt_shards::sum_of_ranks",),
        "each element is the sum of those that stand at its place of what each rank sent, in the"
        " order of the ranks, each addition rounded correctly",
        _summed,
        _names("received ranks"),
    ),
    Axiom(
        "elementwise by runs",
        BY_ELEMENT,
        "IEEE 754 rounds each of these correctly, so that an element has the same bits in whatever"
        " loop, vector or remainder it is computed; exp or tanh do not, nor does alpha * b + a, nor"
        " complex numbers, nor a quotient made whole; the larger of 0.0 and -0.0 is either",
        elementwise,
    ),
)  # fmt: skip

RULES: dict[str, Axiom] = {name: axiom for axiom in AXIOMS for name in axiom.operators}
