"""Descriptions of arguments and results in which each tensor is replaced by its memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from graphopt import _compat


class Layout(NamedTuple):
    """The metadata of a tensor: everything but its values. Sizes and strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_floating(self) -> bool:
        """True if the tensor has real or complex numbers, no integers."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def span(self) -> int:
        """The number of storage elements from the first to the last."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)


class ContainerLayout(NamedTuple):
    """The description of a list, tuple or dictionary among arguments or results."""

    kind: type
    keys: tuple[str, ...]
    values: tuple[Any, ...]


class PlainArgument(NamedTuple):
    """The description of any other argument, with its type to distinguish 1, 1.0 and True."""

    kind: type
    value: Any


def map_layouts(described: Any, function: Callable[[Any], Any]) -> Any:
    """Replaces every `Layout` and `PlainArgument` of a description by `function` of it."""
    if isinstance(described, ContainerLayout):
        values = tuple(map_layouts(value, function) for value in described.values)
        return described._replace(values=values)
    return function(described)


def leaves(described: Any) -> Iterator[Any]:
    """Yields every `Layout` and `PlainArgument` of a description, in order."""
    if isinstance(described, ContainerLayout):
        for value in described.values:
            yield from leaves(value)
    else:
        yield described


def layouts(*described: Any) -> list[Layout]:
    """Returns the layouts of all tensors in descriptions."""
    return [leaf for one in described for leaf in leaves(one) if isinstance(leaf, Layout)]


def restride(
    shape: tuple[int, ...], strides: tuple[int, ...], sizes: tuple[int, ...], *, gaps: bool = True
) -> tuple[int, ...] | None:
    """Returns strides for other `sizes` with the same order of dimensions in memory, or None.

    Dimensions keep their order, a gap stays a gap (twice as wide as it need be) and an expanded
    dimension expanded.

    Returns:
        None where elements overlap otherwise, where the order of dimensions cannot be told (a size
        of 0, an unusual stride at a size of 1), or where there are `gaps` and there must be none.
    """
    if 0 in shape or 0 in sizes:
        return None
    end, new_end = 1, 1
    new: dict[int, int] = {0: 0}
    for stride in sorted({s for s in strides if s}):
        dims = [d for d, s in enumerate(strides) if s == stride]
        larger = [d for d in dims if shape[d] > 1]
        if stride < end or len(larger) > 1:
            return None
        if stride > end:
            if not gaps or not larger:
                return None
            new_end *= 2
        new[stride] = new_end
        for d in larger:
            end, new_end = stride * shape[d], new_end * sizes[d]
    return tuple(new[stride] for stride in strides)


def described(value: Any) -> Any:
    """Describes a value: replaces its tensors by `Layout`s.

    Raises:
        TypeError: it holds what is no plain value: symbolic numbers, tensors without strides.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or _compat.has_symbolic_shape(value):
            raise TypeError("a tensor without plain strides")
        return Layout(tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return ContainerLayout(kind, (), tuple(map(described, value)))
    if isinstance(value, dict):
        return ContainerLayout(dict, tuple(value), tuple(map(described, value.values())))
    if isinstance(value, torch.SymFloat):
        return PlainArgument(float, 0.5)
    if isinstance(value, torch.Generator):
        return PlainArgument(type(None), None)  # the default one, which is put back
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        raise TypeError("a number that is known only when the step runs")
    return PlainArgument(type(value), value)
