"""`scores[tag]`, where `tag` is an integer tensor of one element: a selection, not a decision.

Python's index of a tensor takes such a tensor for the number that it holds, and gives a view. The
view is recorded as one that begins at a place that is known when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphopt import _compat

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


def selects(func: Any, args: Any) -> bool:
    """Whether a torch function is an index by numbers, slices and tensors of one integer, of which
    there is one at least."""
    if func is not torch.Tensor.__getitem__ or not isinstance(args[0], torch.Tensor):
        return False
    parts = _parts(args[1])
    known = all(type(part) in (int, slice) or _is_integer(part) for part in parts)
    return known and any(map(_is_integer, parts)) and len(parts) <= args[0].ndim


def _parts(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _is_integer(part: Any) -> bool:
    if not _compat.is_fake(part) or _compat.is_transformed(part):
        return False
    return part.ndim == 0 and part.dtype in _INTEGERS


def selected(tensor: torch.Tensor, index: Any, read: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """`tensor[index]`, one dimension after another.

    Args:
        read: gives the number that a tensor holds.
    """
    dimension = 0
    for part in _parts(index):
        if type(part) is slice:
            tensor = tensor[(slice(None),) * dimension + (part,)]
            dimension += 1
        else:
            number = part if type(part) is int else read(part)
            tensor = torch.select(tensor, dimension, number)
    return tensor
