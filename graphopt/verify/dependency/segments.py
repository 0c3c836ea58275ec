"""The sources of values: of lists by entry, and of concatenated tensors by segment."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, operator_of
from graphopt.verify.dependency.signatures import Signature

Sources: TypeAlias = dict[frozenset[Signature], int]
"""The collectives that sources pass through -> the numbers of these sources, as bits."""


def union(parts: Iterable[Sources]) -> Sources:
    """Returns the sources of a value that is computed from several."""
    found: Sources = {}
    for part in parts:
        for through, bits in part.items():
            found[through] = found.get(through, 0) | bits
    return found


@dataclass(eq=False)
class SegmentItems:
    """A list of results."""

    values: Sequence[Value]

    @cached_property
    def whole(self) -> Sources:
        """The sources of the list as a whole."""
        return union(whole_of(value) for value in self.values)


@dataclass(eq=False)
class Segments:
    """A tensor with sources for each run of elements in row-major order.

    Attributes:
        bounds: where the runs begin, and where the last one ends.
    """

    bounds: list[int]
    values: Sequence[Sources]

    @cached_property
    def whole(self) -> Sources:
        """The sources of the tensor as a whole."""
        return union(self.values)

    def part(self, start: int, end: int) -> Value:
        """Returns elements `start` to `end`."""
        first = bisect_right(self.bounds, start) - 1
        last = bisect_left(self.bounds, end)
        if last - first == 1:
            return self.values[first]
        inner = self.bounds[first + 1 : last]
        return Segments(
            [0, *(bound - start for bound in inner), end - start], self.values[first:last]
        )


Value: TypeAlias = Sources | SegmentItems | Segments


def whole_of(value: Value) -> Sources:
    """Returns the sources of a value as a whole."""
    return value if isinstance(value, dict) else value.whole


def concatenation(parts: Iterable[tuple[int, Value]]) -> Segments:
    """Concatenates parts, each given with its number of elements, and flattens nested ones."""
    bounds, values = [0], list[Sources]()
    for size, part in parts:
        start = bounds[-1]
        if isinstance(part, Segments):
            bounds += [start + bound for bound in part.bounds[1:]]
            values += part.values
        elif size:
            bounds.append(start + size)
            values.append(whole_of(part))
    return Segments(bounds, values)


def segmented(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that can be read as segments: concatenated vectors, and what is computed
    from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        traits = operator_of(node)
        if traits.elements == "cat":
            if concatenates_vectors(node):
                found.add(node)
        elif (traits.elements or traits.item) and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def concatenates_vectors(node: fx.Node) -> bool:
    """True if a node is a `cat` of one-dimensional tensors with known sizes."""
    value = known_value(node)
    return isinstance(value, torch.Tensor) and value.ndim == 1 and size_of(value) is not None


def size_of(value: Any) -> int | None:
    """Returns the number of elements, or None for non-tensors and data-dependent sizes."""
    if not isinstance(value, torch.Tensor):
        return None
    size = value.numel()
    return size if isinstance(size, int) else None


def split_ends(node: fx.Node) -> list[int] | None:
    """Returns the ends of a `split`'s parts, in elements of its input in row-major order, or None.

    None where the parts are not runs of elements.
    """
    parts = known_value(node)
    if argument(node, "dim") != 0 or not isinstance(parts, (list, tuple)):
        return None
    sizes = [size_of(part) for part in parts]
    return None if None in sizes else list(accumulate(size or 0 for size in sizes))


def slice_range(node: fx.Node, whole: torch.Tensor) -> tuple[int, int] | None:
    """Returns the contiguous elements of `whole`, in row-major order, that a `slice` takes, or
    None."""
    part = known_value(node)
    size, total = size_of(part), size_of(whole)
    if argument(node, "dim") != 0 or argument(node, "step") != 1:
        return None
    start = argument(node, "start") or 0
    if not isinstance(start, int) or not size or not total:
        return None
    rows = whole.shape[0]
    start = max(start + rows, 0) if start < 0 else start
    first = start * (total // rows)
    return first, first + size
