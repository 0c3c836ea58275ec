"""The order in which partitions run, and errors about cycles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from graphopt.errors import PartitionError
from graphopt.graph_utils.ordering import earliest_order, shortest_cycle
from graphopt.partition.assignment import Dependencies, Partition


class PartitionCycleError(PartitionError):
    """Partitions depend on each other, so that none of them can run first.

    Attributes:
        cycle: names of the partitions, each of which has to run before the next, and the last
            before the first.

    >>> from graphopt.partition import PartitionCycleError
    >>> issubclass(PartitionCycleError, graphopt.GraphOptError)
    True
    """

    def __init__(self, cycle: Sequence[Partition], dependencies: Dependencies) -> None:
        names = [partition.name for partition in cycle]
        self.cycle = names[:-1]
        lines = ["partitions depend on each other: " + " -> ".join(names)]
        for before, after in pairwise(cycle):
            lines.append(f"  {before.name} -> {after.name}:  {dependencies[before, after]}")
        lines.append('  hint:  give these nodes one partition, or pass on_cycle="merge"')
        super().__init__("\n".join(lines))


def stable_order(
    partitions: Sequence[Partition], dependencies: Dependencies
) -> list[Partition] | None:
    """Sorts partitions topologically, otherwise as given; None if there is a cycle.

    Of the partitions that could run next, the first is taken.
    """
    rank = {partition: index for index, partition in enumerate(partitions)}
    followers: dict[int, list[int]] = {index: [] for index in rank.values()}
    for before, after in dependencies:
        followers[rank[before]].append(rank[after])
    order = [partitions[index] for index in earliest_order(followers)]
    return order if len(order) == len(partitions) else None


def cyclic_groups(dependencies: Dependencies) -> list[set[Partition]]:
    """Returns the strongly connected components with more than one partition."""
    components = nx.strongly_connected_components(nx.DiGraph(list(dependencies)))
    return [component for component in components if len(component) > 1]


def first_cycle(partitions: Sequence[Partition], dependencies: Dependencies) -> list[Partition]:
    """Returns the shortest cycle through the first partition that is in one, which is its first and
    its last."""
    cyclic = {partition for group in cyclic_groups(dependencies) for partition in group}
    start = next(partition for partition in partitions if partition in cyclic)
    cycle = shortest_cycle(nx.DiGraph(list(dependencies)).adj, start)
    assert cycle is not None
    return cycle


def check_order(partitions: Sequence[Partition], dependencies: Dependencies) -> None:
    """Raises unless every partition comes after its dependencies."""
    rank = {partition: index for index, partition in enumerate(partitions)}
    for (before, after), reason in dependencies.items():
        if rank[before] > rank[after]:
            raise PartitionError(
                f"the original order of partitions cannot be kept: {after.name} comes before"
                f" {before.name}\n  {before.name} -> {after.name}:  {reason}\n"
                "  hint:  leave keep_original_order out to have them ordered by what they read"
            )
