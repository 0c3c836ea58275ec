"""Operators that take the running rank's part of a tensor, so that all ranks have one graph.

    window(flat, starts, length, group)          flat[starts[rank] : starts[rank] + length]
    owned(window, offsets, lengths, size, group) the elements that the rank owns, zeros behind them
    sum_of_ranks(received, ranks)                what all ranks have sent, added in their order

So the graph is the same text on all ranks, and none has a rank in it as a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.ir.rank_groups import shifted_copies

_library = torch.library.Library("graphopt_shards", "FRAGMENT")
_library.define("window(Tensor flat, int[] starts, int length, str group_name) -> Tensor")
_library.define(
    "owned(Tensor window, int[] offsets, int[] lengths, int size, str group_name) -> Tensor"
)
_library.define("sum_of_ranks(Tensor received, int ranks) -> Tensor")

_acting: ContextVar[int | None] = ContextVar("_acting", default=None)


@contextmanager
def acting_as(rank: int) -> Iterator[None]:
    """While active, operators act as the given rank, since one process may simulate several."""
    token = _acting.set(rank)
    try:
        yield
    finally:
        _acting.reset(token)


def rank_in(group_name: str) -> int:
    """The number of this rank in a process group.

    Raises:
        CollectiveError: there is no such group.
    """
    acting = _acting.get()
    if acting is not None:
        ranks = _compat.ranks_of_group(group_name)
        return acting if ranks is None else _index_in_copy(ranks, acting)
    group = _compat.group_named(group_name)
    if group is None:
        raise CollectiveError(f"there is no process group {group_name!r}")
    return group.rank()


def _index_in_copy(ranks: Sequence[int], rank: int) -> int:
    """The index of a rank within the shifted copy of a group that contains it."""
    for copy in shifted_copies(ranks):
        if rank in copy:
            return copy.index(rank)
    raise CollectiveError(f"rank {rank} is in no copy of a group of the ranks {list(ranks)}")


def _window(
    flat: torch.Tensor, starts: Sequence[int], length: int, group_name: str
) -> torch.Tensor:
    return flat.narrow(0, starts[rank_in(group_name)], length).clone()


def _owned(
    window: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int], size: int, group_name: str
) -> torch.Tensor:
    rank = rank_in(group_name)
    part = window.narrow(0, offsets[rank], lengths[rank])
    if lengths[rank] == size:
        return part.clone()
    padded = window.new_zeros(size)
    padded[: lengths[rank]] = part
    return padded


def _sum_of_ranks(received: torch.Tensor, ranks: int) -> torch.Tensor:
    parts = received.view(ranks, -1)
    if ranks == 1:
        return parts[0].clone()
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def _fake_window(
    flat: torch.Tensor, starts: Sequence[int], length: int, group_name: str
) -> torch.Tensor:
    return flat.new_empty(length)


def _fake_owned(
    window: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int], size: int, group_name: str
) -> torch.Tensor:
    return window.new_empty(size)


def _fake_sum(received: torch.Tensor, ranks: int) -> torch.Tensor:
    return received.new_empty(received.numel() // ranks)


_IMPLEMENTED: dict[str, tuple[Any, Any]] = {
    "window": (_window, _fake_window),
    "owned": (_owned, _fake_owned),
    "sum_of_ranks": (_sum_of_ranks, _fake_sum),
}
for _name, (_runs, _fake) in _IMPLEMENTED.items():
    _library.impl(_name, _runs, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt_shards::{_name}", _fake, lib=_library)

window = torch.ops.graphopt_shards.window.default
owned = torch.ops.graphopt_shards.owned.default
sum_of_ranks = torch.ops.graphopt_shards.sum_of_ranks.default
