"""The sizes of prefetched buckets, and how far ahead they are launched, chosen by simulation.

    gather 1  gather 2 | compute 1 | gather 3 | compute 2 | …       small: many starts
    gather 1+2  gather 3+4 | compute 1, compute 2 | …               large: more is held at once

Where the link needs as long as the forward, each start of a collective adds to the step; where a
collective takes long to start, as on many ranks, the more so. So buckets of several sizes are
simulated, and the fastest is taken of those that hold no more than `ROOM` times what the least of
them does: FSDP2 keeps more, all that belongs to no layer. The search is for devices whose costs a
table has, GPUs, so that it is the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import fx

from graphopt.cost import CostModel
from graphopt.schedule.buckets import BucketChooser
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.order import Schedule
from graphopt.schedule.prefetch import AHEAD, Use, buckets_of, order_of_prefetch
from graphopt.schedule.program import Program, Storages, peak_bytes, program_of
from graphopt.schedule.simulator import steady_seconds

SIZES = (1.0, 1.5, 2.0, 3.0)
"""Of buckets, times the first size."""
ROOM = 1.05
"""Of the memory of the order that holds least."""
_GAIN = 1e-3
"""The share of a step that a larger bucket has to gain."""


def fastest_prefetch(
    graph: fx.Graph, before: Predecessors, uses: Sequence[Use], limit: float, costs: CostModel
) -> Schedule:
    """Returns the fastest of the simulated orders.

    Args:
        before: what each node needs (`graphopt.schedule.constraints`).
        uses: of gathers, by first use.
        limit: bytes of a bucket of the first size.
    """
    program = program_of(graph, costs)
    chooser = BucketChooser(program, before, costs)

    def planned(size: float, ahead: int) -> tuple[Schedule, Program]:
        schedule = order_of_prefetch(graph, before, buckets_of(uses, size * limit), ahead)
        joined, _ = chooser.planned(schedule.buckets)
        order = list(schedule.order)
        messages = [joined.launched[node] for node in order if node in joined.launched]
        return schedule, Program(order, joined.late, joined.seconds, messages)

    storages = Storages()
    least = peak_bytes(planned(1.0, AHEAD - 1)[1], storages)
    best, seconds = None, math.inf
    for size, ahead in itertools.product(SIZES, (AHEAD, AHEAD + 1)):
        schedule, tried = planned(size, ahead)
        taken = steady_seconds(tried, costs.slowdown)
        fits = best is None or peak_bytes(tried, storages) <= ROOM * least
        if taken < seconds * (1 - _GAIN) and fits:
            best, seconds = schedule, taken
    assert best is not None
    return best
