"""Canonical symbolic terms: equal terms are equal computations.

A *term* stands for a row of elements, in row-major order, that some computation gives. Terms are
hash-consed: one number for each distinct key, so that whole computations compare as numbers. A
tensor is a row of *segments* of terms, with a shape, a stride, a dtype and a device:

    cat([view(a, [4]), b])[2:6]     =     a[2:4] ++ b[0:2]

so that what views, concatenations and splits do to elements needs no terms of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.sizes import symbolic_layout
from graphopt.verify.values.remembered_calls import CallMemory

Key = tuple[Any, ...]


class Segment(NamedTuple):
    """Elements `start` to `start + length` of a term."""

    term: int
    start: int
    length: int


@dataclass(slots=True)
class TensorValue:
    """The symbolic value of a tensor: its elements and its layout. Treat it as immutable; enforcing
    that would dominate the cost of making the many values of a graph.

    Attributes:
        segments: the elements in row-major order.
        shape, stride: counted in elements; symbolic sizes as text.
        dtype, device: as of the tensor.
    """

    segments: tuple[Segment, ...]
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: str
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:  # hashed for the first time
            self._hash = hash((self.segments, self.shape, self.stride, self.dtype, self.device))
            return self._hash

    @property
    def is_static(self) -> bool:
        """True if all sizes are numbers."""
        return all(isinstance(size, int) for size in self.shape)


@dataclass(slots=True, unsafe_hash=True)
class ScalarValue:
    """The symbolic value of a number, or of anything else that is no tensor."""

    term: int


@dataclass(slots=True, unsafe_hash=True)
class PendingResult:
    """The future result of a collective, which only a wait may read."""

    value: Any


class Term(NamedTuple):
    """The key and properties of one term.

    Attributes:
        uniform: True if all of its elements are one number.
        constant: True if they are numbers that no input influences.
    """

    key: Key
    uniform: bool
    constant: bool


class Terms:
    """The table of all terms of one comparison.

    Attributes:
        recall: the memory of evaluated calls.
        rearranged: the rearranged results of elementwise operators on rearranged terms, by the keys
            of calls.
        entries: the results of list operators' entries with their metadata: by the shared part of a
            call, then by the entry's own arguments.
    """

    def __init__(self, *, whole_cuts: bool = False) -> None:
        self.whole_cuts = whole_cuts
        self.recall = CallMemory()
        self.rearranged: dict[Key, tuple[Segment, ...]] = {}
        self.entries: dict[Key, dict[Key, tuple[Key, list[Any]]]] = {}
        self._numbers: dict[Key, int] = {}
        self._terms: list[Term] = []

    def __len__(self) -> int:
        return len(self._terms)

    def __getitem__(self, number: int) -> Term:
        return self._terms[number]

    def make(self, key: Key, *, uniform: bool = False, constant: bool = False) -> int:
        """Returns the number of the term with this key, which is made at its first use."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._terms)
            self._terms.append(Term(key, uniform, uniform or constant))
        return number

    def segments(self, parts: Iterable[Segment]) -> tuple[Segment, ...]:
        """Returns segments in canonical form: none empty, neighbours joined, constants from 0."""
        found: list[Segment] = []
        for part in parts:
            if not part.length:
                continue
            last = found[-1] if found else None
            if last is not None and last.term == part.term:
                if self[part.term].uniform:
                    found[-1] = Segment(part.term, 0, last.length + part.length)
                    continue
                if last.start + last.length == part.start:
                    found[-1] = Segment(part.term, last.start, last.length + part.length)
                    continue
            start = 0 if self[part.term].uniform else part.start
            found.append(Segment(part.term, start, part.length))
        return tuple(found)

    def part(self, segments: Sequence[Segment], start: int, length: int) -> tuple[Segment, ...]:
        """Returns `length` elements of a row of segments, from `start`."""
        found = []
        offset = 0
        for segment in segments:
            low, high = max(start, offset), min(start + length, offset + segment.length)
            if low < high:
                found.append(Segment(segment.term, segment.start + low - offset, high - low))
            offset += segment.length
        return self.segments(found)

    def parts(
        self, segments: Iterable[Segment], lengths: Iterable[int]
    ) -> list[tuple[Segment, ...]]:
        """Cuts a row of segments into consecutive parts of these lengths."""
        found = []
        remaining = iter(segments)
        term, start, left = 0, 0, 0
        for length in lengths:
            part = []
            while length:
                if not left:
                    term, start, left = next(remaining, (0, 0, 0))
                taken = min(left, length)
                if not taken:
                    break
                part.append(Segment(term, start, taken))
                start, left, length = start + taken, left - taken, length - taken
            found.append(self.segments(part))
        return found


Layout: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype, str]
"""Shape, stride, dtype and device of a tensor."""


def layout_of(value: torch.Tensor) -> Layout:
    """Returns the shape, stride, dtype and device of a tensor as a `TensorValue` has them."""
    if _compat.has_symbolic_shape(value):
        shape, stride = symbolic_layout(value)
    else:
        shape, stride = tuple(value.shape), tuple(value.stride())
    return shape, stride, value.dtype, _name_of(value.device)


def storage_layout_of(value: torch.Tensor) -> Layout:
    """Returns the layout of a tensor's memory, which is one row where that has the elements in
    row-major order."""
    layout = layout_of(value)
    if _compat.has_symbolic_shape(value) or not value.is_contiguous():
        return layout
    return (value.numel(),), (1,), *layout[2:]


@cache
def _name_of(device: torch.device) -> str:
    return str(device)


def tensor_value(segments: Iterable[Segment], like: torch.Tensor) -> TensorValue:
    """Returns the tensor value with these segments and the layout of `like`."""
    return TensorValue(tuple(segments), *layout_of(like))


def whole(term: int, like: torch.Tensor) -> TensorValue:
    """Returns the tensor value of all elements of a term, with the layout of `like`."""
    shape, stride, dtype, device = layout_of(like)
    length = elements(shape)
    return TensorValue((Segment(term, 0, length),) if length else (), shape, stride, dtype, device)


def elements(shape: Sequence[Any]) -> int:
    """Returns the number of elements of a shape; 1 if a size is symbolic, as such tensors are never
    cut."""
    total = 1
    for size in shape:
        total *= size if isinstance(size, int) else 1
    return total


def elements_of(term: int) -> tuple[str, int]:
    """Returns a term as part of a key, distinct from a plain number there."""
    return "elements", term


def canonical(value: Any) -> Any:
    """Returns a value or argument as part of a key, in which 1, 1.0 and True differ."""
    if isinstance(value, (TensorValue, ScalarValue, PendingResult)) or value is None:
        return value
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, (list, tuple)):
        return ("list", *map(canonical, value))
    if isinstance(value, dict):
        return ("dict", *((key, canonical(entry)) for key, entry in value.items()))
    if isinstance(value, slice):
        return ("slice", *map(canonical, (value.start, value.stop, value.step)))
    if isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return (type(value).__name__, str(value))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))  # as text, large ones have gaps
    return ("object", type(value).__name__, str(value))


Origins = dict[int, fx.Node]
"""The first node of one graph that made each term."""
