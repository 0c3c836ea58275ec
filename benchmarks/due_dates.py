"""A lower bound of a step's seconds, valid for any order of its compute, launches and waits.

**Due dates.** A collective cannot start before what it needs is computed (its *head*), and has to
have arrived before what needs it is computed (its *tail*). On one machine, with interruptions
allowed, the least time for such jobs is the largest, over all sets of them, of

    the least head + the sum of their times + the least tail

which is found by serving at each time the job with the longest tail (Jackson's preemptive schedule;
Carlier, "The one-machine sequencing problem", EJOR 1982). Heads and tails are sums of the compute
that must come before and after, in whatever order.

**Late work.** A collective that is waited for in the next iteration may take the compute of both.
Where in each period all launches of a set come after `r` seconds of compute, and all their readers
before the last `t` seconds of compute of the next period, compute of at least ``r + t - C`` lies
between the readers and the launches of one period (`C` is all compute). The messages of the set do
not travel meanwhile, so a period takes at least that and their sum.

**Bursts.** A link that saves up to a burst sends so much less in the time of any set; a group's
message takes at least its latency, and what is left of its transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from graphopt.graph_utils import written
from graphopt.schedule import Message, Program, Timeline

Bits = NDArray[np.uint8]
Seconds = NDArray[np.float64]


class Job(NamedTuple):
    """A job of one machine: `seconds` of work that starts after `head` and precedes `tail`
    seconds."""

    head: float
    seconds: float
    tail: float


def due_date_bound(step: Timeline) -> float:
    """The lower bound, in seconds, of a simulated step under any order of its nodes."""
    program, burst = step.program, step.burst
    found = step.bound_seconds
    if not program.messages:
        return found
    heads = _reached(program, _Backward(program))
    tails = _reached(program, _Forward(program))
    for resource in _resources(program, burst):
        jobs = [
            (message, Job(heads[message.index], seconds, tails[message.index]))
            for message, seconds in resource
        ]
        found = max(
            found,
            jackson(job for message, job in jobs if not message.lag) - burst,
            _late_bound([j for message, j in jobs if message.lag], program.compute_seconds) - burst,
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


def _resources(program: Program, burst: float) -> Iterator[list[tuple[Message, float]]]:
    """Yields the messages, with seconds, that each group and each link must transfer."""
    groups: dict[str, list[tuple[Message, float]]] = {}
    links: dict[str, list[tuple[Message, float]]] = {}
    for message in program.messages:
        asked = message.transfer
        least = asked.latency + max(0.0, asked.transfer - burst)
        groups.setdefault(message.group, []).append((message, least))
        for link in asked.links:
            links.setdefault(link, []).append((message, asked.transfer))
    yield from groups.values()
    yield from links.values()


def _reached(program: Program, way: _Forward | _Backward) -> Seconds:
    """Returns per message the total seconds of all nodes that it reaches.

    A row of bits for each node says which messages reach it; nodes with the same row share it.
    """
    width = (len(program.messages) + 7) // 8
    empty = np.zeros(width, dtype=np.uint8)
    rows: dict[fx.Node, Bits] = {}
    total = np.zeros(8 * width)
    pending: list[Bits] = []
    weights: list[float] = []
    for node in way.order:
        row = empty
        for source in way.sources(node):
            found = rows.get(source, empty)
            if found is not empty:
                row = found if row is empty else row | found
        started = way.started(node)
        if started is not None:
            row = row.copy()
            row[started // 8] |= 128 >> (started % 8)
        rows[node] = row
        way.passed_on(node, row, rows)
        if node in program.seconds and row is not empty:
            pending.append(row)
            weights.append(program.seconds[node])
        if len(pending) == 1024:
            total += np.asarray(weights) @ np.unpackbits(np.stack(pending), axis=1)
            pending, weights = [], []
    if pending:
        total += np.asarray(weights) @ np.unpackbits(np.stack(pending), axis=1)
    return total[: len(program.messages)]


class _Forward:
    """Traversal from messages to the nodes that need them."""

    def __init__(self, program: Program) -> None:
        self.order = program.order
        self._program = program
        self._states = _states_written_late(program)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        late = self._program.late
        if node not in late:
            return node.all_input_nodes
        # What a late node needs of others was computed in the iteration before.
        return [s for s in node.all_input_nodes if s in late or s.op == "placeholder"]

    def started(self, node: fx.Node) -> int | None:
        message = self._program.waited.get(node)
        return None if message is None else message.index

    def passed_on(self, node: fx.Node, row: Bits, rows: dict[fx.Node, Bits]) -> None:
        for state in self._states.get(node, ()):
            rows[state] = rows[state] | row


class _Backward:
    """Traversal from messages to the nodes that they need."""

    def __init__(self, program: Program) -> None:
        self.order = program.order[::-1]
        self._program = program
        self._states = _states_written_late(program)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        late = self._program.late
        users = [user for user in node.users if node in late or user not in late]
        reads = [user for state in self._states.get(node, ()) for user in state.users]
        return [*users, *(user for user in reads if user not in late)]

    def started(self, node: fx.Node) -> int | None:
        message = self._program.launched.get(node)
        return None if message is None else message.index

    def passed_on(self, node: fx.Node, row: Bits, rows: dict[fx.Node, Bits]) -> None:
        """Does nothing: `sources` already includes the readers of a state."""


def _states_written_late(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Maps late nodes to the inputs of the step that they update."""
    return {node: written(node) for node in program.order if node in program.late and written(node)}
