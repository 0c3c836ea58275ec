"""Indexing by numbers that the graph computes (`scores[tag]`, `x[:, i]`), traced as a selection
without specializing.

Python's index takes such a number for the one that it is in this call. It is recorded as a view
that begins at a place that is known when the step runs, one for each such number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphopt import _compat

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_INDICES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_OF_NO_DIMENSION = (type(None), bool)


def selects(func: Any, args: Any) -> bool:
    """True if a torch function indexes a tensor by numbers that the graph computes, in known
    dimensions."""
    if func not in _INDICES or not isinstance(args[0], torch.Tensor):
        return False
    parts = _parts(args[1])
    if not any(map(_is_found_then, parts)) or sum(part is Ellipsis for part in parts) > 1:
        return False
    return all(map(_is_plain, parts)) and sum(map(_taken, parts)) <= args[0].ndim


def selected(func: Any, args: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    """Traces an indexing by numbers that the graph computes.

    Args:
        read: gives the number that a tensor of one integer holds.
    """
    tensor, rest = _narrowed(args[0], _parts(args[1]), read)
    if func is torch.Tensor.__getitem__:
        return tensor[rest] if rest else tensor
    tensor[rest or (Ellipsis,)] = args[2]
    return None


def _narrowed(
    tensor: torch.Tensor, parts: tuple[Any, ...], read: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A tensor without the dimensions that computed numbers select from, and the index's rest."""
    parts = tuple(_with_bounds(part, read) for part in parts)
    numbers = [read(part) if _is_integer(part) else part for part in parts]
    for dimension, place in reversed(list(_dimensions(tensor, parts))):
        if _is_number(parts[place]):
            tensor = torch.select(tensor, dimension, numbers[place])
    return tensor, tuple(part for part in parts if not _is_number(part))


def _dimensions(tensor: torch.Tensor, parts: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """Yields for each part of an index its first dimension and its place."""
    dimension = 0
    for place, part in enumerate(parts):
        yield dimension, place
        left = tensor.ndim - sum(map(_taken, parts))
        dimension += left if part is Ellipsis else _taken(part)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _taken(part: Any) -> int:
    """The number of dimensions that a part of an index covers."""
    if part is Ellipsis or isinstance(part, _OF_NO_DIMENSION):
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.ndim
    return 1


def _is_plain(part: Any) -> bool:
    """True if it is known which dimensions a part of an index covers."""
    known = (int, bool, slice, type(None), type(Ellipsis))
    return type(part) in known or _is_number(part) or isinstance(part, torch.Tensor)


def _is_found_then(part: Any) -> bool:
    if type(part) is slice:
        return any(map(_is_integer, (part.start, part.stop)))
    return _is_number(part)


def _is_number(part: Any) -> bool:
    return isinstance(part, torch.SymInt) or _is_integer(part)


def _is_integer(part: Any) -> bool:
    if not _compat.is_fake(part) or _compat.is_transformed(part):
        return False
    return part.ndim == 0 and part.dtype in _INTEGERS


def _with_bounds(part: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    """A part of an index with numbers in place of tensors as slice bounds."""
    if type(part) is not slice:
        return part
    return slice(*(read(b) if _is_integer(b) else b for b in (part.start, part.stop, part.step)))
