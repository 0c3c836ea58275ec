"""A search for an order that hides communication: early launches, late waits, compute in the gaps.

List scheduling (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969) on
two kinds of machines, the stream that computes and the queues of the groups, along the clock of a
simulation (`graphopt.schedule.list_scheduler`):

- *Launches.* Before each node that computes, as long as a group's link would stand idle while it
  does, the group's message with the earliest due date is launched, of those that could be: its
  inputs are there, or need nothing but the step's inputs and little compute (an all-gather of
  parameters). A message is due when compute wants what it brings. Not earlier than that: what waits
  in a queue cannot be overtaken by what is more urgent.
- *Compute.* Nodes keep their order, with two exceptions. One that would wait is passed over for
  another that need not. And nodes off the path, which lead to little (gradients of weights,
  updates), stand back by a share of the step: those on the path reach the next launch sooner, and
  what stood back fills the time until it has arrived.
- *Memory.* Whatever is made before its place needs room until that: no more than the given order
  leaves at its fullest. Where room is short, something is waited for that lets go of what was sent,
  and what has stood back longest is computed.
- *Buckets.* With the best of these policies, all-gathers and reduce-scatters are then put together
  until starting a bucket is a small share of its time (`graphopt.schedule.buckets`).

What comes out is simulated, and counts only if it is faster than what was given, and holds no more
memory. Where more memory is allowed than the given order holds, levels below that are tried as
well, so that more memory is never to anybody's harm. Where a budget is given, a second search
begins with an order that holds little (`graphopt.schedule.frugal`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from torch import fx

from graphopt.cost import CostModel
from graphopt.errors import ScheduleError
from graphopt.readable.columns import readable_bytes
from graphopt.runtime.memory import collector_paused
from graphopt.schedule.buckets import BucketChooser, Buckets, crowded, side_by_side
from graphopt.schedule.constraints import Predecessors, predecessors
from graphopt.schedule.frugal import frugal_order
from graphopt.schedule.list_scheduler import ListPolicy, ListScheduler
from graphopt.schedule.order import Schedule
from graphopt.schedule.program import Program, Storages, communication_bound, program_of
from graphopt.schedule.simulator import steady_seconds
from graphopt.schedule.tables import ProgramTables

POLICIES = (ListPolicy(0.0, True), ListPolicy(0.06, True))
"""The policies tried, in order, until an order is close to its bound."""
FRUGAL = ListPolicy(0.0, False)
"""An additional policy for short memory."""
SHARE = 0.2
"""The share of a bucket's time that its launch costs, when it closes."""
# fmt: off
_LEVELS = (
    1.02, 1.05, 1.08, 1.1, 1.12, 1.14, 1.17, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 3.0, 5.0,
)
# fmt: on
"""Memory limits tried, as multiples of the given order's peak, up to the limit allowed; then eight
times that, doubled again and again."""
_RESERVES = (0, 1.5, 4)
"""Multiples of an order's memory excess by which the next attempt lowers its limit."""
_ATTEMPTS = 4
"""The number of times that buckets are dropped because memory is exceeded."""
_CLOSE = 1.01
"""The search ends at an order within this factor of the bound."""
_GAIN = 1e-6
"""The share of a step by which an order must be faster to be used."""


def overlap_schedule(
    graph: fx.Graph,
    cost_model: CostModel,
    world_size: int | None = None,
    max_bytes: int | None = None,
    buckets: bool = True,
) -> Schedule | None:
    """Returns the fastest schedule found, or None if the graph already has it.

    A function of its arguments alone, so that all ranks with the same graph decide alike.

    Args:
        graph: without late nodes.
        world_size: ranks of its groups, where these are not there to be asked.
        max_bytes: of values that are held at once, inputs left out; None: what the graph holds.
        buckets: whether all-gathers and reduce-scatters may become fewer.

    Raises:
        ScheduleError: the graph has late nodes, or no order was found that holds no more than
            `max_bytes`.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import Schedule, overlap_schedule
    >>> found = overlap_schedule(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> found is None or isinstance(found, Schedule)
    True
    """
    with collector_paused():  # it would go through the whole graph, a third of the time
        return _found(graph, cost_model, world_size, max_bytes, buckets)


def _found(
    graph: fx.Graph,
    cost_model: CostModel,
    world_size: int | None,
    max_bytes: int | None,
    buckets: bool,
) -> Schedule | None:
    program, before = program_of(graph, cost_model, world_size), predecessors(graph)
    if program.late:
        raise ScheduleError("late nodes have their places: schedule before nodes are moved")
    bases = [program]
    if max_bytes is not None:
        bases.append(_reordered(program, frugal_order(program, before)))
    searches = [_OrderSearch(base, before, cost_model, max_bytes) for base in bases]
    for search in searches if program.messages else ():
        for most in search.levels():
            search.orders(most)
            if buckets:
                chooser = BucketChooser(search.program, before, cost_model, world_size)
                search.try_buckets(chooser, most)
    best = min(searches, key=_OrderSearch.seconds)
    if best.seconds() == math.inf:
        raise ScheduleError(
            f"no order was found that holds at most {readable_bytes(max_bytes or 0)}: the graph as"
            f" it is holds {readable_bytes(searches[0].held)}; allow so much, or split its batch"
        )
    return None if best.schedule is None and best.program is program else best.found()


class _OrderSearch:
    """A search over orders that keeps the best one.

    Args:
        program: as it is given.
        before: what each of its nodes needs.
        cost_model: says by how much compute is slower while a collective is under way.
        max_bytes: that may be held at once; None: what the program holds.

    Attributes:
        held: bytes that the program holds as it is given.
        schedule: the best one; None where that is the program's.
    """

    def __init__(
        self, program: Program, before: Predecessors, cost_model: CostModel, max_bytes: int | None
    ) -> None:
        self.program, self._before = program, before
        self._slowdown = cost_model.slowdown
        self._storages = Storages()
        self._tables = ProgramTables(program, before, self._storages)
        self.held = int(max(self._tables.fullest.values, default=0))
        self._most = self.held if max_bytes is None else max_bytes
        sending = communication_bound(program)
        self._bound = max(program.compute_seconds, sending)
        self._computing = sum(
            seconds for node, seconds in program.seconds.items() if node not in program.launched
        )
        self._limited = False
        self._seconds = math.inf
        fits = self.held <= self._most
        self._given = steady_seconds(program, self._slowdown) if fits else math.inf
        self._policy = POLICIES[0]
        self.schedule: Schedule | None = None

    def levels(self) -> Iterator[int]:
        """Yields memory limits in bytes, lowest first, while a higher one can make a difference."""
        most = min(self.held, self._most)
        for times in itertools.chain(
            (1.0,), _LEVELS, (8.0 * 2**power for power in itertools.count())
        ):
            level = most if times == 1 else int(times * self.held)
            if level > self._most:
                return
            self._limited = False
            yield level
            if not self._limited:
                return

    def orders(self, most: int) -> None:
        """Tries all policies on the program without buckets."""
        for policy in (*POLICIES, FRUGAL):
            if self._seconds <= _CLOSE * self._bound:
                break
            if policy is FRUGAL and not self._limited:
                break
            self._order(self._tables, policy, (), most)

    def try_buckets(self, chooser: BucketChooser, most: int) -> None:
        """Tries buckets with the best policy, and with the frugal order if memory is short."""
        planned: dict[Buckets, ProgramTables] = {}
        policies = dict.fromkeys((self._policy, FRUGAL))
        for policy in policies:
            if self._seconds <= _CLOSE * self._computing:
                return
            found = self.schedule is not None and self.schedule.buckets
            if policy is FRUGAL and policy is not self._policy and (found or not self._limited):
                continue
            buckets = chooser.choose(SHARE)
            for _ in range(_ATTEMPTS):
                if not buckets:
                    break
                if buckets not in planned:
                    planned[buckets] = ProgramTables(*chooser.planned(buckets), self._storages)
                buckets = self._order(planned[buckets], policy, buckets, most)

    def _order(
        self, tables: ProgramTables, policy: ListPolicy, buckets: Buckets, most: int
    ) -> Buckets:
        """Orders a program by a policy, and keeps the result if it is faster and within memory.

        Returns:
            Where it holds more: the buckets that are not there then, to try with these alone.
        """
        program, excess = tables.program, 0.0
        for times in _RESERVES:
            scheduler = ListScheduler(tables, policy, most, times * excess)
            nodes = side_by_side(scheduler.run(), program.messages)
            self._limited |= scheduler.limited
            if scheduler.end >= min(self._seconds, self._given) * (1 - _GAIN):
                return ()
            tried = _reordered(program, nodes)
            _, held = tables.lives.held([tables.number[node] for node in nodes])
            excess = int(held.max(initial=0)) - most
            self._limited |= excess > 0
            if excess <= 0:
                seconds = steady_seconds(tried, self._slowdown)
                if seconds < self._seconds * (1 - _GAIN):
                    self._seconds, self._policy = seconds, policy
                    self.schedule = Schedule(tuple(nodes), buckets)
                return ()
            crowd = crowded(tried, np.flatnonzero(held > most)) if buckets else set()
            if crowd:
                return tuple(bucket for bucket in buckets if bucket not in crowd)
        return ()

    def seconds(self) -> float:
        """Returns the seconds of the best order, the given one included; infinite if none fits into
        memory."""
        if self._seconds >= self._given * (1 - _GAIN):
            self.schedule, self._seconds = None, self._given
        return self._seconds

    def found(self) -> Schedule:
        """Returns the best schedule."""
        found = self.schedule or Schedule(tuple(self.program.order))
        found.check(self._before)
        return found


def _reordered(program: Program, order: list[fx.Node]) -> Program:
    messages = [program.launched[node] for node in order if node in program.launched]
    return Program(order, program.late, program.seconds, messages)
