"""An order in which communication is hidden: launches early, waits late, compute fills the gaps.

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
  until starting a bucket is a small share of its time (`graphopt.schedule.buckets`), for several
  shares.

What comes out is simulated, and counts only if it is faster than what was given, and holds no more
memory. Where more memory is allowed than the given order holds, every level below that is tried as
well, so that more memory is never to anybody's harm.
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
from graphopt.runtime.collector import collector_paused
from graphopt.schedule.bounds import communication_bound
from graphopt.schedule.buckets import BucketChooser, Buckets, crowded, side_by_side
from graphopt.schedule.constraints import Predecessors, predecessors
from graphopt.schedule.list_scheduler import ListPolicy, ListScheduler
from graphopt.schedule.order import Schedule
from graphopt.schedule.program import Program, Storages, program_of
from graphopt.schedule.simulator import steady_seconds
from graphopt.schedule.tables import ProgramTables

POLICIES = (ListPolicy(0.0, True), ListPolicy(0.06, True))
"""What is tried, until an order is close to its bound."""
FRUGAL = ListPolicy(0.0, False)
"""What is tried as well where memory is short."""
SHARES = (0.2, 0.05)
"""Of the time of a bucket that starting it takes: what is tried."""
_LEVELS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Times what the given order holds: how much memory is tried, where so much is allowed; beyond that
eight times, and twice as much again and again."""
_RESERVES = (0, 1.5, 4)
"""Where an order holds more than it may, the next has so many times the excess less room for what
is made early."""
_ATTEMPTS = 4
"""How often buckets are given up because too much is held."""
_CLOSE = 1.01
"""Of the bound: an order that is so close ends the search."""
_GAIN = 1e-6
"""Share of a step that an order has to gain to be worth it."""


def overlap_schedule(
    graph: fx.Graph,
    cost_model: CostModel,
    world_size: int | None = None,
    max_bytes: int | None = None,
    buckets: bool = True,
) -> Schedule | None:
    """The fastest schedule found, or None where that is what the graph has.

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
    program = program_of(graph, cost_model, world_size)
    if program.late:
        raise ScheduleError("late nodes have their places: schedule before nodes are moved")
    search = _OrderSearch(program, predecessors(graph), cost_model, max_bytes)
    if not program.messages:
        return search.found()
    for most in search.levels():
        search.orders(most)
        if buckets:
            chooser = BucketChooser(program, search.before, cost_model, world_size)
            search.put_together(chooser, most)
    return search.found()


class _OrderSearch:
    """Orders that are tried, and the best of them.

    Args:
        program: as it is given.
        before: what each of its nodes needs.
        cost_model: says by how much compute is slower while a collective is under way.
        max_bytes: that may be held at once; None: what the program holds.
    """

    def __init__(
        self, program: Program, before: Predecessors, cost_model: CostModel, max_bytes: int | None
    ) -> None:
        self.before = before
        self._program = program
        self._disturbed = cost_model.slowdown, cost_model.burst
        self._storages = Storages()
        self._tables = ProgramTables(program, before, self._storages)
        self._held = int(max(self._tables.fullest.values, default=0))
        self._most = self._held if max_bytes is None else max_bytes
        sending = communication_bound(program, cost_model.burst)
        self._bound = max(program.compute_seconds, sending)
        self._computing = sum(
            seconds for node, seconds in program.seconds.items() if node not in program.launched
        )
        self._limited = False
        self._seconds = math.inf
        self._policy = POLICIES[0]
        self._schedule: Schedule | None = None

    def levels(self) -> Iterator[int]:
        """Bytes that orders may hold, the least first, while more can make a difference."""
        most = min(self._held, self._most)
        for times in itertools.chain(
            (1.0,), _LEVELS, (8.0 * 2**power for power in itertools.count())
        ):
            level = most if times == 1 else int(times * self._held)
            if level > self._most:
                return
            self._limited = False
            yield level
            if not self._limited:
                return

    def orders(self, most: int) -> None:
        """Try all policies on the program as it is."""
        for policy in (*POLICIES, FRUGAL):
            if self._seconds <= _CLOSE * self._bound:
                break
            if policy is FRUGAL and not self._limited:
                break
            self._order(self._tables, policy, (), most)

    def put_together(self, chooser: BucketChooser, most: int) -> None:
        """Try buckets, with the policy of the best order, and the frugal one if that finds none and
        memory is short."""
        planned: dict[Buckets, ProgramTables] = {}
        policies = dict.fromkeys((self._policy, FRUGAL))
        for share, policy in itertools.product(SHARES, policies):
            if self._seconds <= _CLOSE * self._computing:
                return
            found = self._schedule is not None and self._schedule.buckets
            if policy is FRUGAL and policy is not self._policy and (found or not self._limited):
                continue
            buckets = chooser.choose(share)
            for _ in range(_ATTEMPTS):
                if not buckets:
                    break
                if buckets not in planned:
                    planned[buckets] = ProgramTables(*chooser.planned(buckets), self._storages)
                buckets = self._order(planned[buckets], policy, buckets, most)

    def _order(
        self, tables: ProgramTables, policy: ListPolicy, buckets: Buckets, most: int
    ) -> Buckets:
        """Order a program by a policy, and keep that where it is faster and holds no more.

        Returns:
            Where it holds more: the buckets that are not there then, to try with these alone.
        """
        program, excess = tables.program, 0.0
        for times in _RESERVES:
            scheduler = ListScheduler(tables, policy, most, times * excess)
            nodes = side_by_side(scheduler.run(), program.messages)
            self._limited |= scheduler.limited
            if scheduler.end >= self._seconds * (1 - _GAIN):
                return ()
            tried = _reordered(program, nodes)
            held = tables.held([tables.number[node] for node in nodes])
            excess = int(held.max(initial=0)) - most
            self._limited |= excess > 0
            if excess <= 0:
                seconds = steady_seconds(tried, *self._disturbed)
                if seconds < self._seconds * (1 - _GAIN):
                    self._seconds, self._policy = seconds, policy
                    self._schedule = Schedule(tuple(nodes), buckets)
                return ()
            crowd = crowded(tried, np.flatnonzero(held > most)) if buckets else set()
            if crowd:
                return tuple(bucket for bucket in buckets if bucket not in crowd)
        return ()

    def found(self) -> Schedule | None:
        """The best schedule, if it is faster than what was given or has to take its place.

        Raises:
            ScheduleError: all hold too much.
        """
        if self._held > self._most and self._schedule is None:
            raise ScheduleError(
                f"no order was found that holds at most {readable_bytes(self._most)}: the graph as"
                f" it is holds {readable_bytes(self._held)}; allow so much, or split its batch"
            )
        if self._schedule is None:
            return None
        self._schedule.check(self.before)
        given = steady_seconds(self._program, *self._disturbed)
        needless = self._held <= self._most and self._seconds >= given * (1 - _GAIN)
        return None if needless else self._schedule


def _reordered(program: Program, order: list[fx.Node]) -> Program:
    messages = [program.launched[node] for node in order if node in program.launched]
    return Program(order, program.late, program.seconds, messages)
