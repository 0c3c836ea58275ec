"""An order in which communication is hidden: launches early, waits late, compute fills the gaps.

List scheduling (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969) on
two kinds of machines, the stream that computes and the queues of the groups, along the clock of a
simulation:

- *Launches.* Before each node that computes, as long as a link would stand idle while it does, the
  message with the earliest due date is launched, of those that could be: its inputs are there, or
  need nothing but the step's inputs and little compute (an all-gather of parameters). A message is
  due when compute reaches its first reader. Not earlier than that: what waits in a queue cannot be
  overtaken by what is more urgent.
- *Memory.* What arrives before it would have in the given order needs room: no more than the given
  order leaves, at its fullest, until the message is read.
- *Compute.* Nodes keep their order, except that a node that would wait is overtaken by those of the
  next `window` nodes that need not: gradients of weights, say, while those of activations travel.
- *Buckets.* With the best of these policies, all-gathers and reduce-scatters are then put together
  until starting a bucket is a small share of its time (`graphopt.schedule.buckets`), for several
  shares.

Each result is simulated, and counts only if it is faster than what was found before, and holds no
more memory than what was given.
"""

from __future__ import annotations

import math

from torch import fx

from graphopt.cost import CostModel
from graphopt.schedule.buckets import BucketChooser, Buckets, crowded, side_by_side
from graphopt.schedule.constraints import Predecessors, predecessors
from graphopt.schedule.errors import ScheduleError
from graphopt.schedule.list_scheduler import ListScheduler
from graphopt.schedule.order import Schedule
from graphopt.schedule.program import Program, program_of
from graphopt.schedule.simulator import simulate_program

POLICIES = ((256, True), (256, False), (0, False))
"""What is tried: how many nodes ahead compute may be taken from, and whether a message whose input
is there may be held back for one that is due earlier."""
SHARES = (0.2, 0.05)
"""Of the time of a bucket that starting it takes: what is tried."""
_SHRINKS = (1.5, math.inf)
"""Where an order holds more than it may, the next has so many times the excess less room."""
_ATTEMPTS = 4
"""How often buckets are given up because too much is held."""
_CLOSE = 1.01
"""Of the bound: an order that is so close ends the search."""
_GAIN = 1e-6
"""Share of a step that an order has to gain to be worth it."""

_Policy = tuple[int, bool]


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
        ScheduleError: the graph has late nodes.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import Schedule, overlap_schedule
    >>> found = overlap_schedule(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> found is None or isinstance(found, Schedule)
    True
    """
    program = program_of(graph, cost_model, world_size)
    if not program.messages:
        return None
    if program.late:
        raise ScheduleError("late nodes have their places: schedule before nodes are moved")
    before = predecessors(graph)
    search = _Search(program, cost_model.slowdown, max_bytes)
    for policy in POLICIES:
        if search.seconds <= _CLOSE * search.given.bound_seconds:
            break
        search.order(program, before, policy, ())
    if buckets:
        _put_together(search, BucketChooser(program, before, cost_model, world_size))
    if search.schedule is not None:
        search.schedule.check(before)
    return search.schedule


def _put_together(search: _Search, chooser: BucketChooser) -> None:
    """Try buckets, with the policy of the best order and with the one that holds least."""
    for policy in dict.fromkeys((search.policy, POLICIES[-1])):
        for share in SHARES:
            if search.seconds <= _CLOSE * search.given.compute_seconds:
                return
            buckets = chooser.choose(share)
            for _ in range(_ATTEMPTS):
                if not buckets:
                    break
                buckets = search.order(*chooser.planned(buckets), policy, buckets)


class _Search:
    """Orders that are tried, and the best of them.

    Args:
        program: as it is given.
        slowdown: of compute, while a collective is under way.
        max_bytes: that may be held at once; None: what the program holds.

    Attributes:
        given: what the program takes.
        most: bytes that may be held at once.
        seconds: of the fastest schedule.
        schedule: that one; None: the given one.
        policy: that found the fastest order, the first one if none did.
    """

    def __init__(self, program: Program, slowdown: float, max_bytes: int | None) -> None:
        self._slowdown = slowdown
        self.given = simulate_program(program, slowdown)
        self.most = self.given.peak_bytes if max_bytes is None else max_bytes
        self.seconds = self.given.step_seconds
        self.schedule: Schedule | None = None
        self.policy: _Policy = POLICIES[0]

    def order(
        self, program: Program, before: Predecessors, policy: _Policy, buckets: Buckets
    ) -> Buckets:
        """Order a program by a policy, and keep that where it is faster and holds no more.

        Returns:
            Where it holds more: the buckets that are not there then, to try with these alone.
        """
        room: float = self.most
        for excess_times in (*_SHRINKS, 0.0):
            scheduler = ListScheduler(program, before, *policy, room)
            nodes = side_by_side(scheduler.run(), program.messages)
            tried = _reordered(program, nodes)
            found = simulate_program(tried, self._slowdown)
            if found.peak_bytes <= self.most:
                break
            crowd = crowded(tried, self.most)
            if crowd:
                return tuple(bucket for bucket in buckets if bucket not in crowd)
            room = max(0.0, self.most - excess_times * (found.peak_bytes - self.most))
        if found.peak_bytes <= self.most and found.step_seconds < self.seconds * (1 - _GAIN):
            self.seconds, self.policy = found.step_seconds, policy
            self.schedule = Schedule(tuple(nodes), buckets)
        return ()


def _reordered(program: Program, order: list[fx.Node]) -> Program:
    messages = [program.launched[node] for node in order if node in program.launched]
    return Program(order, program.late, program.seconds, messages)
