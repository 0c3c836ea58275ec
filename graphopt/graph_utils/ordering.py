"""Orders that change as little as they have to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush


def earliest_order(followers: Mapping[int, Iterable[int]]) -> Iterator[int]:
    """Numbers, each before its followers, and as far as that allows from small to large (Kahn's
    algorithm with a heap). Those that are in a circle, or behind one, are left out."""
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
