"""Values that are more than one vertex: lists, and tensors that were concatenated."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt.ir.metadata import known_value
from graphopt.ir.operators import operator_of


@dataclass(eq=False)
class SegmentItems:
    """A value of several results. `joined`: the vertex for all of them, once there is one."""

    values: Sequence[Value]
    joined: int | None = None


@dataclass(eq=False)
class Segments:
    """A tensor of which each run of elements, in row-major order, has a vertex of its own.

    Attributes:
        bounds: where the runs begin, and where the last one ends.
        joined: the vertex for all of them, once there is one.
    """

    bounds: list[int]
    values: Sequence[int]
    joined: int | None = None

    def part(self, start: int, end: int) -> Value:
        """Elements `start` to `end`."""
        first = bisect_right(self.bounds, start) - 1
        last = bisect_left(self.bounds, end)
        if last - first == 1:
            return self.values[first]
        inner = self.bounds[first + 1 : last]
        return Segments(
            [0, *(bound - start for bound in inner), end - start], self.values[first:last]
        )


Value: TypeAlias = int | SegmentItems | Segments
"""A vertex, or a value of several vertices."""


def concatenation(parts: Iterable[tuple[int, Value]]) -> Segments:
    """The parts, each with its number of elements, one after another. Nested ones are dissolved."""
    bounds, values = [0], list[int]()
    for size, part in parts:
        start = bounds[-1]
        if isinstance(part, Segments):
            bounds += [start + bound for bound in part.bounds[1:]]
            values += part.values
        elif isinstance(part, int) and size:
            bounds.append(start + size)
            values.append(part)
    return Segments(bounds, values)


def segmented(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that may be read as segments: concatenations of vectors, and what follows from them."""
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
    """True if a `cat` puts tensors of one dimension and known sizes side by side."""
    value = known_value(node)
    return isinstance(value, torch.Tensor) and value.ndim == 1 and size_of(value) is not None


def size_of(value: Any) -> int | None:
    """Number of elements, None where there is no tensor or its size depends on data."""
    if not isinstance(value, torch.Tensor):
        return None
    size = value.numel()
    return size if isinstance(size, int) else None


def split_ends(node: fx.Node) -> list[int] | None:
    """Ends of the parts of a `split`, counted in elements of its input in row-major order.

    None where the parts are not runs of elements.
    """
    parts = known_value(node)
    if _argument(node, 2, "dim", 0) != 0 or not isinstance(parts, (list, tuple)):
        return None
    ends, end = [], 0
    for part in parts:
        size = size_of(part)
        if size is None:
            return None
        end += size
        ends.append(end)
    return ends


def slice_range(node: fx.Node, whole: torch.Tensor) -> tuple[int, int] | None:
    """The elements of `whole`, in row-major order, that a `slice` takes; None if not a run."""
    part = known_value(node)
    size, total = size_of(part), size_of(whole)
    if _argument(node, 1, "dim", 0) != 0 or _argument(node, 4, "step", 1) != 1:
        return None
    start = _argument(node, 2, "start", None) or 0
    if not isinstance(start, int) or not size or not total:
        return None
    rows = whole.shape[0]
    start = max(start + rows, 0) if start < 0 else start
    first = start * (total // rows)
    return first, first + size


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)
