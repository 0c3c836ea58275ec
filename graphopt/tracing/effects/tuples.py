"""Nested tuples of numbers, and tuples and lists of tensors, that a step replaces in an outside
place:

self.state = self.state._replace(count=self.state.count + 1)
self.hidden = cell(x, self.hidden)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.outside.places import OutsidePlace

_AT_MOST = 100
"""Tensors of a list."""


def leaves_of(value: Any, is_one: Callable[[Any], bool]) -> tuple[list[Any], Any] | None:
    """The leaves and structure of a nested tuple, or of a short list of tensors and tuples of
    tensors.

    Args:
        is_one: whether a leaf is one of those that are looked for.

    Returns:
        None for everything else, and where there are other leaves.
    """
    is_list = type(value) is list and is_one is is_tensor and len(value) <= _AT_MOST
    of_these = is_list and all(is_one(each) or _is_nest(each, is_one) for each in value)
    if not isinstance(value, tuple) and not of_these:
        return None
    leaves, spec = _compat.tree_flatten(value)
    return (leaves, spec) if leaves and all(map(is_one, leaves)) else None


def _is_nest(value: Any, is_one: Callable[[Any], bool]) -> bool:
    """True if a list's item may be a tuple of tensors."""
    if is_one is not is_tensor or not isinstance(value, tuple):
        return False
    return all(is_tensor(each) or _is_nest(each, is_one) for each in value)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_tensor_or_plain(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, int, float, str, type(None)))


class TupleTable(MutableMapping[Any, Any]):
    """The tensors of a tuple in a place, by position; empty if the tuple has another structure.

    Args:
        place: in which each call may find another tuple.
        spec: how the tuple is nested.
        is_one: whether a leaf of the tuple may be one.
    """

    def __init__(
        self, place: OutsidePlace, spec: Any, is_one: Callable[[Any], bool] = is_tensor
    ) -> None:
        self.place, self._spec, self._is_one = place, spec, is_one

    def _leaves(self) -> list[Any]:
        found = leaves_of(self.place.now(), self._is_one)
        return [] if found is None or found[1] != self._spec else found[0]

    def __getitem__(self, position: int) -> Any:
        leaves = self._leaves()
        if not leaves:
            raise KeyError(position)
        return leaves[position]

    def __setitem__(self, position: int, tensor: Any) -> None:
        self.place.write(with_leaf(self.place.now(), position, tensor))

    def __delitem__(self, position: int) -> None:
        raise TypeError("a tuple keeps its items")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._leaves())


def nests_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The container itself, and all that are nested in it, with their positions and keys."""
    if isinstance(value, (tuple, list, deque, dict)):
        yield path, value
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nests_in(item, (*path, key))


def with_leaf(value: Any, position: int, leaf: Any) -> Any:
    """A copy of a nested tuple with another leaf at a position."""
    leaves, spec = _compat.tree_flatten(value)
    leaves[position] = leaf
    return _compat.tree_unflatten(leaves, spec)
