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

The result is simulated, and counts only if it is faster than what was given, and holds no more
memory.
"""

from __future__ import annotations

import math

from torch import fx

from graphopt.cost import CostModel
from graphopt.schedule.constraints import predecessors
from graphopt.schedule.errors import ScheduleError
from graphopt.schedule.list_scheduler import ListScheduler
from graphopt.schedule.order import Schedule
from graphopt.schedule.program import Program, program_of
from graphopt.schedule.simulator import simulate_program

POLICIES = ((256, True), (256, False), (0, False))
"""What is tried: how many nodes ahead compute may be taken from, and whether a message whose input
is there may be held back for one that is due earlier."""
_SHRINKS = (1.5, math.inf)
"""Where an order holds more than it may, the next has so many times the excess less room."""
_CLOSE = 1.01
"""Of the bound: an order that is so close ends the search."""
_GAIN = 1e-6
"""Share of a step that an order has to gain to be worth it."""


def overlap_schedule(
    graph: fx.Graph,
    cost_model: CostModel,
    world_size: int | None = None,
    max_bytes: int | None = None,
) -> Schedule | None:
    """The fastest order found, or None where that is the one the graph has.

    A function of its arguments alone, so that all ranks with the same graph decide alike.

    Args:
        graph: without late nodes.
        world_size: ranks of its groups, where these are not there to be asked.
        max_bytes: of values that are held at once, inputs left out; None: what the graph holds.

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
    slowdown = cost_model.slowdown
    given = simulate_program(program, slowdown)
    most = given.peak_bytes if max_bytes is None else max_bytes
    before = predecessors(graph)
    best, least = program, given.step_seconds
    for window, holds in POLICIES:
        if least <= _CLOSE * given.bound_seconds:
            break
        room: float = most
        for excess_times in (*_SHRINKS, 0.0):
            scheduler = ListScheduler(program, before, window, holds, room)
            tried = _reordered(program, scheduler.run())
            found = simulate_program(tried, slowdown)
            if found.peak_bytes <= most:
                break
            room = max(0.0, most - excess_times * (found.peak_bytes - most))
        if found.peak_bytes <= most and found.step_seconds < least * (1 - _GAIN):
            best, least = tried, found.step_seconds
    if best is program:
        return None
    schedule = Schedule(tuple(best.order))
    schedule.check(before)
    return schedule


def _reordered(program: Program, order: list[fx.Node]) -> Program:
    messages = [program.launched[node] for node in order if node in program.launched]
    return Program(order, program.late, program.seconds, messages)
