"""Topological orders that change a given order as little as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush


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
