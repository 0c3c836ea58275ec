"""Runs of an operator's real kernel on scratch tensors, to find the layout of its results.

Shape rules (meta kernels) are written apart from kernels, and some of them are wrong about strides.
Nothing of what runs here can be seen afterwards: the tensors are the kernel's own, the generators
copies or put back, and large sizes are replaced by small ones that lie in memory alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import without_autocast
from graphopt.ir.generators import generators_apart
from graphopt.tracing.layouts.layouts import (
    ContainerLayout,
    Layout,
    PlainArgument,
    described,
    layouts,
    leaves,
    map_layouts,
    restride,
)

SMALL = 1 << 16
"""The most elements of arguments and results for which scratch tensors have the real sizes at
once."""

LARGEST = 1 << 24
"""The most elements with which a kernel is run."""

_KEPT = 8
"""The largest size that is never shrunk, since it may mean something else (a kernel, a group, a
list)."""


Call = tuple[Any, ContainerLayout, ContainerLayout]
"""Operator, positional and keyword arguments."""


@lru_cache(maxsize=1 << 14)
def true_results(
    call: Call, expected: Any, elementwise: bool, settings: tuple[Any, ...] = ()
) -> Any | None:
    """Returns the layouts of the real kernel's results for a described call, cached forever.

    Args:
        expected: what the shape rule says.
        elementwise: sizes have no meaning but that equal ones are broadcast against each other.
        settings: the global settings that may decide which kernel runs.

    Returns:
        The same nest as `expected`; None where no kernel could be run.
    """
    if not all(_is_here(layout.device) for layout in layouts(*call[1:])):
        return None
    with _unseen(layouts(*call[1:])):
        for sizes in _shrinkings(call, expected, elementwise):
            found = _true_results_at(call, expected, sizes, known=elementwise)
            if found is not None:
                return found
    return None


def _shrinkings(call: Call, expected: Any, elementwise: bool) -> Iterator[Mapping[int, int]]:
    """Yields substitutions of small sizes for large ones, the most cautious first."""
    given = layouts(*call[1:])
    found = sorted({size for layout in given for size in layout.shape})
    if elementwise:
        yield dict(zip((size for size in found if size > 1), count(2), strict=False))
    total = sum(layout.span for layout in (*given, *layouts(expected)))
    if total <= SMALL:
        yield {}
        return
    first = max(given, key=lambda layout: layout.span).shape[0]
    if first > 2:
        yield {first: 2}
    large = [size for size in found if size > _KEPT]
    yield dict(zip(large, count(_KEPT + 2, 2), strict=False))
    for divisor in (16, 4, 2):
        if all(size % divisor == 0 for size in large):
            yield {size: size // divisor for size in large}
    if total <= LARGEST:
        yield {}


def _true_results_at(
    call: Call, expected: Any, sizes: Mapping[int, int], known: bool
) -> Any | None:
    shrunk = _shrunk(call, sizes)
    if shrunk is None or _elements(shrunk, expected, sizes) > LARGEST:
        return None
    if sizes and not known and not _agrees(shrunk, expected, sizes):
        return None
    # Of values of two kinds, since the kernel may refuse one.
    found = next(filter(None, (called(shrunk, fill) for fill in (halves, identities))), None)
    return None if found is None else _enlarged(found, expected, sizes)


def _elements(shrunk: Call, expected: Any, sizes: Mapping[int, int]) -> int:
    """Returns the total elements of a call's arguments and (gapless) results."""
    shapes = [[sizes.get(size, size) for size in layout.shape] for layout in layouts(expected)]
    given = sum(layout.span for layout in layouts(*shrunk[1:]))
    return given + sum(math.prod(shape) for shape in shapes)


def _shrunk(call: Call, sizes: Mapping[int, int]) -> Call | None:
    """Returns the call with substituted sizes, or None if a layout cannot be shrunk."""
    if not sizes:
        return call
    failed = False

    def smaller(leaf: Any) -> Any:
        nonlocal failed
        if isinstance(leaf, PlainArgument):
            return (
                leaf._replace(value=sizes.get(leaf.value, leaf.value)) if leaf.kind is int else leaf
            )
        shape = tuple(sizes.get(size, size) for size in leaf.shape)
        strides = restride(leaf.shape, leaf.strides, shape)
        failed |= strides is None
        return leaf._replace(shape=shape, strides=strides)

    args, kwargs = map_layouts(call[1], smaller), map_layouts(call[2], smaller)
    return None if failed else (call[0], args, kwargs)


def _agrees(shrunk: Call, expected: Any, sizes: Mapping[int, int]) -> bool:
    """True if the shape rule gives the small call the same layouts as the real one."""
    with _compat.plain_fake_mode():
        found = called(shrunk, _empty)
    if found is None:
        return False
    ours, theirs = layouts(found), layouts(expected)
    if len(ours) != len(theirs):
        return False
    for small, real in zip(ours, theirs, strict=True):
        if small.shape != tuple(sizes.get(size, size) for size in real.shape):
            return False
        if small.strides != restride(real.shape, real.strides, small.shape):
            return False
    return True


def _enlarged(found: Any, expected: Any, sizes: Mapping[int, int]) -> Any | None:
    """Converts layouts found at the small sizes to the real ones, or returns None."""
    if not sizes:
        return found
    ours, theirs = list(leaves(found)), list(leaves(expected))
    if len(ours) != len(theirs):
        return None
    results = []
    for small, real in zip(ours, theirs, strict=True):
        if not isinstance(small, Layout) or not isinstance(real, Layout):
            results.append(real)
            continue
        if len(small.shape) != len(real.shape):
            return None
        strides = restride(small.shape, small.strides, real.shape, gaps=False)
        if strides is None:
            return None
        results.append(small._replace(shape=real.shape, strides=strides))
    supply = iter(results)
    return map_layouts(expected, lambda leaf: next(supply))


def called(
    call: Call,
    make: Callable[[Layout], torch.Tensor],
    look: Callable[[Any], Any | None] = described,
) -> Any | None:
    """Runs a call on tensors made for it and returns `look` of the result, or None if it raises."""
    try:
        args, kwargs = _built(call[1], make), _built(call[2], make)
        return look(call[0](*args, **kwargs))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError):
        return None


def _built(value: Any, make: Callable[[Layout], torch.Tensor]) -> Any:
    if isinstance(value, Layout):
        return make(value)
    if isinstance(value, PlainArgument):
        return value.value
    values = [_built(item, make) for item in value.values]
    if value.kind is dict:
        return dict(zip(value.keys, values, strict=True))
    return value.kind(values)


def _empty(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )


def halves(layout: Layout) -> torch.Tensor:
    """Returns a tensor of 0.5 (a valid probability), or of integers 0 (a valid index)."""
    return _fill(_empty(layout), 0.5 if layout.is_floating else 0)


def identities(layout: Layout) -> torch.Tensor:
    """Returns invertible matrices, or integers valid as divisors."""
    tensor = _fill(_empty(layout), 0 if len(layout.shape) > 1 else 1)
    if len(layout.shape) > 1 and 0 not in layout.strides:
        tensor.diagonal(dim1=-2, dim2=-1).fill_(1)
    return tensor


def _fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
    _storage(tensor).fill_(value)
    return tensor


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all elements of a tensor's storage, expanded ones once."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _is_here(device: torch.device) -> bool:
    """True if kernels of a device can run here, and its generators be restored."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


@contextmanager
def _unseen(given: list[Layout]) -> Iterator[None]:
    """A context in which nothing is traced, and generators keep their states."""
    devices = {layout.device for layout in given if layout.device.type == "cuda"}
    with unrecorded(), generators_apart(devices):
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context in which operators run outside of all traces."""
    with _compat.without_modes(), torch.no_grad(), without_autocast():
        yield
