"""Autocast, inference-mode and grad-mode regions that cross partition boundaries.

The nodes that begin and end them change the state of the thread. A partition that begins inside a
region enters it first, and one that ends inside leaves it last:

    enter; a | b; exit; c    becomes    enter; a; exit    and    enter; b; exit; c

Grad mode is set, not entered. A partition begins with the last setting before it, and leaves grad
mode as the whole graph does, so that it can run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from graphopt.errors import PartitionError
from graphopt.ir.modes import (
    MODE_SWITCHES,
    enters_inference_mode,
    exit_of,
    is_endless,
    sets_grad_mode,
    switch_mode,
)
from graphopt.partition.assignment import Assignment, Partition


@dataclass
class RegionBounds:
    """The nodes that begin or end regions, and those to repeat at a partition's begin and end."""

    states: frozenset[fx.Node]
    before: dict[Partition, list[fx.Node]] = field(default_factory=dict)
    after: dict[Partition, list[fx.Node]] = field(default_factory=dict)

    def nodes_of(self, partition: Partition) -> list[fx.Node]:
        """Returns all nodes to run for a partition."""
        if not self.states:
            return partition.nodes
        return [*self.before[partition], *partition.nodes, *self.after.get(partition, ())]


def find_states(graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the nodes that begin or end regions."""
    found = (graph.find_nodes(op="call_function", target=target) for target in MODE_SWITCHES)
    return frozenset(node for nodes in found for node in nodes)


def find_regions(assignment: Assignment, states: frozenset[fx.Node]) -> RegionBounds:
    """Finds the regions that cross partitions, which each partition must repeat."""
    regions = RegionBounds(states)
    if not states:
        return regions
    _check_contiguous(assignment)
    active: list[fx.Node] = []
    for node, partition in assignment.items():
        if partition not in regions.before:
            regions.before[partition] = list(active)
        # A region without an end is entered by the first partition, for all.
        if node in states and not is_endless(node):
            switch_mode(active, node)
    grad_at_end = _setting_outside(active)
    for partition, following in pairwise(regions.before):
        regions.after[partition] = _unwinding(regions.before[following], grad_at_end)
    return regions


def _setting_outside(active: list[fx.Node]) -> fx.Node | None:
    """Returns the grad-mode setting in effect outside all inference regions, or None."""
    for node in active:
        if enters_inference_mode(node):
            return None
        if sets_grad_mode(node):
            return node
    return None


def _unwinding(active: list[fx.Node], grad_at_end: fx.Node | None) -> list[fx.Node]:
    found = [exit_ for node in reversed(active) if (exit_ := exit_of(node)) is not None]
    setting = _setting_outside(active)
    if setting is not None and grad_at_end is not None and setting.args != grad_at_end.args:
        found.append(grad_at_end)
    return found


def _check_contiguous(assignment: Assignment) -> None:
    """Raises unless each partition is contiguous in the graph, in increasing order."""
    seen: set[Partition] = set()
    last: Partition | None = None
    for node, partition in assignment.items():
        if partition is last:
            continue
        if last is not None and (partition in seen or _is_less(partition, last)):
            raise PartitionError(
                f"partitions must not decrease in a graph with autocast or grad-mode regions:"
                f" %{node.name} is in {partition.name}, after nodes in {last.name}"
            )
        seen.add(partition)
        last = partition


def _is_less(a: Partition, b: Partition) -> bool:
    """Compares two partitions, as numbers if both names are numbers."""
    try:
        return float(a.name) < float(b.name)
    except ValueError:
        return False
