"""A lower bound of a step's seconds, valid for any order of its compute, launches and waits in
which nothing is recomputed for the backward before the loss is there (`compute_between.py`).

**Due dates.** A collective cannot start before what it needs is computed (its *head*), and has to
have arrived before what needs it is computed (its *tail*). On one machine, with interruptions
allowed, the least time for such jobs is the largest, over all sets of them, of

    the least head + the sum of their times + the least tail

which is found by serving at each time the job with the longest tail (Jackson's preemptive schedule;
Carlier, "The one-machine sequencing problem", EJOR 1982). Heads and tails are sums of the compute
that must come before and after, in whatever order.

**Gradients of weights.** A scatter of a gradient does not need those of other weights; but what is
computed behind its launch, to hide it, has to be scattered as well, behind it. So of each other
collective either the compute that it alone needs lies before the launch, or its transfer behind:
the lesser of both counts.

**Late work.** A collective that is waited for in the next iteration may take the compute of both.
Where in each period all launches of a set come after `r` seconds of compute, and all their readers
before the last `t` seconds of compute of the next period, compute of at least ``r + t - C`` lies
between the readers and the launches of one period (`C` is all compute). The messages of the set do
not travel meanwhile, so a period takes at least that and their sum.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compute_between import ComputeBetween
from graphopt.schedule import Message, Program, Timeline

Seconds = NDArray[np.float64]
Resource = list[tuple[Message, float]]
"""The messages that a group or link has to transfer, with seconds."""

LONGEST = 8
"""The number of collectives, the longest ones, behind which others are counted."""


class Job(NamedTuple):
    """A job of one machine: `seconds` of work that starts after `head` and precedes `tail`
    seconds."""

    head: float
    seconds: float
    tail: float


def due_date_bound(step: Timeline) -> float:
    """The lower bound, in seconds, of a simulated step under any order of its nodes."""
    program = step.program
    found = step.bound_seconds
    if not program.messages:
        return found
    compute = ComputeBetween(program)
    resources = list(_resources(program))
    for resource in resources:
        late, now = (
            [
                Job(compute.before[message.index], seconds, compute.behind[message.index])
                for message, seconds in resource
                if bool(message.lag) == is_late
            ]
            for is_late in (True, False)
        )
        followed = _Followed(compute, resources, resource)
        longest = sorted(followed.messages, key=lambda each: -each[1])[:LONGEST]
        found = max(
            found,
            *(followed.bound(message.index, seconds) for message, seconds in longest),
            jackson(now),
            _late_bound(late, program.compute_seconds),
        )
    return found


def jackson(jobs: Iterable[Job]) -> float:
    """Returns the end of the last tail if the job with the longest tail is always served (Jackson's
    preemptive schedule)."""
    coming = sorted(jobs)
    ready: list[tuple[float, float]] = []  # negative tail, seconds left
    now = latest = 0.0
    index = 0
    while index < len(coming) or ready:
        if not ready:
            now = max(now, coming[index].head)
        while index < len(coming) and coming[index].head <= now:
            heapq.heappush(ready, (-coming[index].tail, coming[index].seconds))
            index += 1
        tail, left = heapq.heappop(ready)
        until = coming[index].head if index < len(coming) else float("inf")
        served = min(left, until - now)
        now += served
        if left > served:
            heapq.heappush(ready, (tail, left - served))
        else:
            latest = max(latest, now - tail)
    return latest


def _late_bound(jobs: list[Job], compute: float) -> float:
    """Returns the bound from jobs whose results are due in the next period."""
    latest_reader = max((compute - job.tail for job in jobs), default=0.0)
    apart = [job for job in jobs if job.head >= latest_reader]
    return jackson(apart) - compute if apart else 0.0


def _resources(program: Program) -> Iterator[Resource]:
    """Yields the messages, with seconds, that each group and each link must transfer."""
    groups: dict[str, Resource] = {}
    links: dict[str, Resource] = {}
    for message in program.messages:
        groups.setdefault(message.group, []).append((message, message.transfer.seconds))
        for link in message.transfer.links:
            links.setdefault(link, []).append((message, message.transfer.transfer))
    yield from groups.values()
    yield from links.values()


class _Followed:
    """The collectives of one group or link, some of which follow a long one.

    Args:
        resources: of all groups and links.
        resource: of this one.

    Attributes:
        messages: those of them that are waited for in their own iteration.
    """

    def __init__(
        self, compute: ComputeBetween, resources: list[Resource], resource: Resource
    ) -> None:
        self._compute, self._resources = compute, resources
        self.messages = [(m, seconds) for m, seconds in resource if m.waits and not m.lag]
        columns = np.asarray([message.index for message, _ in self.messages], dtype=int)
        self._taken = np.asarray([seconds for _, seconds in self.messages])
        needed = compute.needed[:, columns]
        self._owned = needed.any(1) if len(columns) else np.zeros(len(needed), dtype=bool)
        self._owner = needed.argmax(1) if len(columns) else np.zeros(len(needed), dtype=int)

    def bound(self, index: int, seconds: float) -> float:
        """Returns the least seconds of a step in which message `index` takes `seconds`, and others
        follow it or have their compute before it."""
        compute = self._compute
        others = self._owned & ~compute.needed[:, index]
        anyway = compute.before[index] + self._least(others, np.ones((others.sum(), 1), bool))[0]
        behind = compute.between[:, index] + self._least(others, compute.needing[others])
        found = anyway
        for resource in self._resources:
            jobs = [
                Job(compute.before[m.index], taken, behind[m.index])
                for m, taken in resource
                if not m.lag and compute.follows[m.index, index]
            ]
            found = max(found, jackson(jobs))
        return float(found + seconds)

    def _least(self, others: NDArray[np.bool_], counted: NDArray[np.bool_]) -> Seconds:
        """Returns for each column the least seconds of compute before, or of transfers behind.

        Args:
            others: the nodes that compute and are not needed.
            counted: of these, and for each column, whether they count.
        """
        compute = np.zeros((len(self._taken), counted.shape[1]))
        np.add.at(compute, self._owner[others], counted * self._compute.seconds[others, None])
        least: Seconds = np.minimum(compute, self._taken[:, None]).sum(0)
        return least
