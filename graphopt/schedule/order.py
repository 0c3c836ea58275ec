"""A schedule (an order of nodes and buckets of collectives) as data, and the function that applies
it.

order                buckets             graph
-----                -------             -----
g1 = all_gather(a)                       g  = all_gather_coalesced([a, b])
g2 = all_gather(b)   ((g1, g2),)   ==>   i  = g[0]
w1 = wait(g1)                            i1 = g[1]
w2 = wait(g2)                            w1 = wait(i)
                                         w2 = wait(i1)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphopt.errors import ScheduleError
from graphopt.schedule.bucketing import check_bucket, join_launches
from graphopt.schedule.constraints import Predecessors


@dataclass(frozen=True)
class Schedule:
    """An order of a graph's nodes, and the launches to fuse into one collective each.

    Attributes:
        order: every node of the graph, once.
        buckets: all-gathers or reduce-scatters that become one each, in order. The members of a
            bucket stand one right behind the other in `order`, so that none needs another.

    >>> from graphopt.schedule import Schedule
    >>> len(Schedule(tuple(gm.graph.nodes)).order) == len(gm.graph.nodes)
    True
    """

    order: tuple[fx.Node, ...]
    buckets: tuple[tuple[fx.Node, ...], ...] = ()

    def check(self, before: Predecessors) -> None:
        """Raises unless the order has all nodes once and after their predecessors, and the buckets
        are valid.

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
        self.check_buckets()

    def check_buckets(self) -> None:
        """Raises if a bucket's launches cannot be one collective or are not adjacent in the order.

        Raises:
            ScheduleError: there is such a bucket, or one launch is in two.
        """
        members = [launch for bucket in self.buckets for launch in bucket]
        wanted = set(members)
        if len(wanted) != len(members):
            raise ScheduleError("a schedule has no launch in two buckets")
        position = {node: index for index, node in enumerate(self.order) if node in wanted}
        for bucket in self.buckets:
            check_bucket(bucket)
            places = [position.get(launch, -1) for launch in bucket]
            if places != list(range(places[0], places[0] + len(bucket))) or places[0] < 0:
                raise ScheduleError(
                    f"a schedule joins %{bucket[0].name} and others, which do not stand one right"
                    " behind the other in its order"
                )


def apply_schedule(graph: fx.Graph, schedule: Schedule) -> int:
    """Reorders a graph and fuses its buckets. Returns the number of moved nodes plus the number of
    saved collectives.

    Raises:
        ScheduleError: a bucket cannot be one collective. Nothing is changed.

    >>> from graphopt.schedule import Schedule, apply_schedule
    >>> apply_schedule(gm.graph, Schedule(tuple(gm.graph.nodes)))
    0
    """
    schedule.check_buckets()
    changed = 0
    previous: fx.Node | None = None
    for node in schedule.order:
        if previous is not None and previous.next is not node:
            previous.append(node)
            changed += 1
        previous = node
    for bucket in schedule.buckets:
        join_launches(graph, bucket)
        changed += len(bucket) - 1
    return changed
