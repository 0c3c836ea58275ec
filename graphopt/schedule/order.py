"""An order of all nodes as data, and the one function that applies it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.errors import ScheduleError


@dataclass(frozen=True)
class Schedule:
    """In which order a graph is to run.

    Attributes:
        order: every node of the graph, once.

    >>> from graphopt.schedule import Schedule
    >>> len(Schedule(tuple(gm.graph.nodes)).order) == len(gm.graph.nodes)
    True
    """

    order: tuple[fx.Node, ...]

    def check(self, before: Predecessors) -> None:
        """Refuse an order that is not one of all nodes, or runs a node before what it needs.

        Raises:
            ScheduleError: it does.
        """
        position = {node: index for index, node in enumerate(self.order)}
        if len(position) != len(self.order) or position.keys() != before.keys():
            raise ScheduleError("a schedule has every node of its graph once")
        for node, needed in before.items():
            for source in needed:
                if position[source] > position[node]:
                    raise ScheduleError(
                        f"a schedule runs %{node.name} before %{source.name}, which it needs"
                    )


def apply_schedule(graph: fx.Graph, schedule: Schedule) -> int:
    """Put the nodes of a graph into the order of `schedule`. Returns how many had to move.

    >>> from graphopt.schedule import Schedule, apply_schedule
    >>> apply_schedule(gm.graph, Schedule(tuple(gm.graph.nodes)))
    0
    """
    moved = 0
    previous: fx.Node | None = None
    for node in schedule.order:
        if previous is not None and previous.next is not node:
            previous.append(node)
            moved += 1
        previous = node
    return moved
