"""Tuples of numbers that a step finds in a place outside, and leaves others of:

self.state = self.state._replace(count=self.state.count + 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphopt import _compat


def leaves_of(value: Any, is_number: Callable[[Any], bool]) -> tuple[list[Any], Any] | None:
    """The numbers in a tuple or a named tuple, of such perhaps, and how they are nested.

    Args:
        is_number: whether a leaf is one.

    Returns:
        None for everything else, and where there are other leaves.
    """
    if not isinstance(value, tuple):
        return None
    leaves, spec = _compat.tree_flatten(value)
    return (leaves, spec) if leaves and all(map(is_number, leaves)) else None


def with_leaf(value: Any, position: int, leaf: Any) -> Any:
    """Such a tuple with another number in a position."""
    leaves, spec = _compat.tree_flatten(value)
    leaves[position] = leaf
    return _compat.tree_unflatten(leaves, spec)
