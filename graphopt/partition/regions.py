"""Autocast, inference-mode and grad-mode regions that partitions cross.

The nodes that begin and end them change the state of the thread. A partition that begins inside a
region enters it first, and one that ends inside leaves it last:

    enter; a | b; exit; c    becomes    enter; a; exit    and    enter; b; exit; c

Grad mode is set, not entered. A partition begins with the last setting before it, and leaves grad
mode as the whole graph does, so that it can run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from graphopt._compat.partition import ENTER_INFERENCE_MODE, EXIT_OF, SET_GRAD_ENABLED
from graphopt.errors import PartitionError
from graphopt.partition.assignment import Assignment, Partition


@dataclass
class RegionBounds:
    """Nodes that begin or end regions, and those to repeat where a partition begins and ends."""

    states: frozenset[fx.Node]
    before: dict[Partition, list[fx.Node]] = field(default_factory=dict)
    after: dict[Partition, list[fx.Node]] = field(default_factory=dict)

    def nodes_of(self, partition: Partition) -> list[fx.Node]:
        """All nodes to run for a partition."""
        if not self.states:
            return partition.nodes
        return [*self.before[partition], *partition.nodes, *self.after[partition]]


def find_states(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that begin or end regions."""
    targets = (*EXIT_OF, *EXIT_OF.values(), SET_GRAD_ENABLED)
    found = (graph.find_nodes(op="call_function", target=target) for target in targets)
    return frozenset(node for nodes in found for node in nodes)


def find_regions(assignment: Assignment, states: frozenset[fx.Node]) -> RegionBounds:
    """Regions that partitions cross, and that each partition has to repeat."""
    regions = RegionBounds(states)
    if not states:
        return regions
    _check_contiguous(assignment)
    grad_at_end = _grad_at_end(assignment, states)
    active: list[fx.Node] = []
    current: Partition | None = None
    for node, partition in assignment.items():
        if partition is not current:
            if current is not None:
                regions.after[current] = _unwinding(active, grad_at_end)
            regions.before[partition] = list(active)
            current = partition
        if node in states:
            _update(active, node)
    if current is not None:
        regions.after[current] = []
    return regions


def _update(active: list[fx.Node], node: fx.Node) -> None:
    """Let `active` have what is in effect after `node`, in graph order."""
    if _sets_grad(node):
        inner = _begin_of_innermost(active)
        active[inner:] = [*(n for n in active[inner:] if not _sets_grad(n)), node]
    elif node.target in EXIT_OF:
        if _exit(node) is not None:  # else the first partition leaves it active for all
            active.append(node)
    else:
        enter = node.all_input_nodes[0]
        if enter.target is ENTER_INFERENCE_MODE:
            del active[active.index(enter) :]
        else:
            active.remove(enter)


def _begin_of_innermost(active: list[fx.Node]) -> int:
    """Where the innermost inference region begins: its end restores the grad mode before it."""
    inside = [i for i, node in enumerate(active) if node.target is ENTER_INFERENCE_MODE]
    return inside[-1] + 1 if inside else 0


def _grad_at_end(assignment: Assignment, states: frozenset[fx.Node]) -> fx.Node | None:
    """The setting of grad mode that the whole graph leaves in effect."""
    active: list[fx.Node] = []
    for node in assignment:
        if node in states:
            _update(active, node)
    return _setting_outside(active)


def _setting_outside(active: list[fx.Node]) -> fx.Node | None:
    """The setting of grad mode in effect outside of all inference regions."""
    for node in active:
        if node.target is ENTER_INFERENCE_MODE:
            return None
        if _sets_grad(node):
            return node
    return None


def _unwinding(active: list[fx.Node], grad_at_end: fx.Node | None) -> list[fx.Node]:
    found = [exit_ for node in reversed(active) if (exit_ := _exit(node)) is not None]
    setting = _setting_outside(active)
    if setting is not None and grad_at_end is not None and setting.args != grad_at_end.args:
        found.append(grad_at_end)
    return found


def _sets_grad(node: fx.Node) -> bool:
    return node.target is SET_GRAD_ENABLED


def _exit(node: fx.Node) -> fx.Node | None:
    """The node that ends what `node` begins."""
    return next((user for user in node.users if user.target is EXIT_OF.get(node.target)), None)


def _check_contiguous(assignment: Assignment) -> None:
    """Raise unless each partition is one piece of the graph, in increasing order of numbers."""
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
    """By number, where both names are numbers."""
    try:
        return float(a.name) < float(b.name)
    except ValueError:
        return False
