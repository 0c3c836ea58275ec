"""Placement of gathers into the backward, where the link would idle, by predicted costs.

    compute    backward 3 | backward 2     | backward 1     |
    link       scatter 3  | gather 3 .     | scatter 2 .    | scatter 1

What has been scattered is updated and gathered as soon as it has arrived, if the scatters that
follow still leave in time: the last of them, for which everything waits, may not end later than
without. What is gathered so, the next forward need not wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from graphopt.comm import CommBlock
from graphopt.cost import CostModel, collective_of
from graphopt.cost.collectives import in_one_call
from graphopt.schedule.gathers import GatherGroup
from graphopt.schedule.program import program_of


def place_by_cost(
    graph: fx.Graph, groups: Sequence[GatherGroup], blocks: Sequence[CommBlock], costs: CostModel
) -> None:
    """Places each group of gathers behind the first launch where it does not delay the last
    scatter.

    Args:
        groups: of which those that need a bucket alone are placed.
        blocks: the collectives of gradients, in launch order.
    """
    queue = _SimulatedLink(graph, blocks, costs)
    waiting = [group for group in groups if group.block is not None]
    for place in range(len(blocks) - 1):
        for group in list(waiting):
            assert group.block is not None
            if not queue.has_arrived(group.block.comm_node, place):
                continue
            members = [collective_of(launch) for launch in group.launches]
            if not queue.insert(place, costs.transfer_of(in_one_call(members)).seconds):
                break
            group.after = blocks[place].comm_node
            waiting.remove(group)


class _SimulatedLink:
    """A simulated link: the times of scatters, and of gathers sent between them.

    Args:
        blocks: the scatters, in launch order.
    """

    def __init__(self, graph: fx.Graph, blocks: Sequence[CommBlock], costs: CostModel) -> None:
        program = program_of(graph, costs)
        now, launched = 0.0, {}
        for node in program.order:
            launched[node] = now
            now += program.seconds.get(node, 0.0)
        self._place = {block.comm_node: index for index, block in enumerate(blocks)}
        self._launched = [launched[node] for node in self._place]
        self._sent = [[program.launched[node].transfer.seconds] for node in self._place]
        self._last = self._ends()[-1]

    def _ends(self) -> list[float]:
        """Returns the arrival time of each scatter in seconds."""
        free, found = -math.inf, []
        for begin, (scatter, *others) in zip(self._launched, self._sent, strict=True):
            found.append(max(begin, free) + scatter)
            free = found[-1] + sum(others)
        return found

    def has_arrived(self, launch: fx.Node, place: int) -> bool:
        """True if a scatter has arrived when the one at `place` is launched."""
        return self._ends()[self._place[launch]] <= self._launched[place]

    def insert(self, place: int, seconds: float) -> bool:
        """Inserts a gather behind the scatter at `place` unless that delays the last scatter.
        Returns True if it was inserted."""
        self._sent[place].append(seconds)
        if self._ends()[-1] <= self._last:
            return True
        self._sent[place].pop()
        return False
