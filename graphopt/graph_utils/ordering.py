"""Topological orders that change a given order as little as possible, and cycles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def earliest_order(followers: Mapping[int, Iterable[int]]) -> Iterator[int]:
    """Yields numbers before their followers, the smallest first where possible (Kahn's algorithm
    with a heap). Omits those in or behind a cycle."""
    waiting = Counter(follower for found in followers.values() for follower in found)
    ready = [number for number in followers if not waiting[number]]
    heapify(ready)
    while ready:
        number = heappop(ready)
        yield number
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, follower)


def shortest_cycle(followers: Mapping[T, Iterable[T]], start: T) -> list[T] | None:
    """Returns the shortest cycle through `start`, which is its first and its last, or None."""
    came_from: dict[T, T] = {}
    pending = [start]
    for current in pending:  # grows while it is read
        for follower in followers.get(current, ()):
            if follower not in came_from:
                came_from[follower] = current
                pending.append(follower)
    if start not in came_from:
        return None
    cycle = [start, came_from[start]]
    while cycle[-1] != start:
        cycle.append(came_from[cycle[-1]])
    return cycle[::-1]
