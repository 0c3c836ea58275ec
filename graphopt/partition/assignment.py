"""Assignment of nodes to partitions, and dependencies between partitions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from torch import fx

from graphopt.errors import PartitionError
from graphopt.partition.hazards import OrderReason, hazards
from graphopt.partition.module_attributes import Attributes

SplitCallback = Callable[[fx.Node], Any]


@dataclass(eq=False)
class Partition:
    """The nodes that become one submodule.

    Attributes:
        name: what the split callback returned for its nodes, as text.
        submod_name: name of the submodule.
        nodes: nodes of the graph that is split, in its order.
        inputs: nodes whose values are passed in, by first use.
        outputs: nodes whose values are returned, by first use elsewhere.
        constants: `get_attr` nodes of modules, such as the branches of `torch.cond`, that become
            part of the submodule.
        dependencies, dependents: names of the partitions that run before and after because of this
            one.

    >>> model = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
    >>> graph = graphopt.partition.partition_graph(model, lambda node: node.name)
    >>> graph.nodes["_0"]["partition"].outputs
    [_0]
    """

    name: str
    submod_name: str
    nodes: list[fx.Node] = field(default_factory=list, repr=False)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    constants: list[fx.Node] = field(default_factory=list, repr=False)
    dependencies: list[str] = field(default_factory=list)
    dependents: list[str] = field(default_factory=list)


Assignment = dict[fx.Node, Partition]
Dependencies = dict[tuple[Partition, Partition], OrderReason]


def is_call(node: fx.Node) -> bool:
    """True if a node belongs in a partition, since it is no input, constant or output."""
    return node.op in ("call_function", "call_method", "call_module")


def assign(graph: fx.Graph, split_callback: SplitCallback, affix: str | None = None) -> Assignment:
    """Assigns each call to a partition, in graph order. `affix` is for names of submodules."""
    prefix = "submod" if affix is None else f"submod_{affix}"
    partitions: dict[str, Partition] = {}
    taken: set[str] = set()
    assignment = {}
    for node in graph.nodes:
        if not is_call(node):
            continue
        identifier = split_callback(node)
        if identifier is None:
            raise PartitionError(f"split_callback returned no partition for %{node.name}")
        name = str(identifier)
        if name not in partitions:
            partitions[name] = Partition(name, unique_name(f"{prefix}_{name}", taken))
        partition = partitions[name]
        partition.nodes.append(node)
        assignment[node] = partition
    return assignment


def unique_name(wanted: str, taken: set[str]) -> str:
    """Returns `wanted` with dots replaced, and numbered if it is taken."""
    base = wanted.replace(".", "_")
    names = chain([base], (f"{base}_{number}" for number in count(1)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def distinct(assignment: Assignment) -> list[Partition]:
    """Returns the partitions by first appearance in the graph."""
    return list(dict.fromkeys(assignment.values()))


def find_dependencies(
    graph: fx.Graph, attributes: Attributes, assignment: Assignment, states: Collection[fx.Node]
) -> Dependencies:
    """Returns, for each ordered pair of dependent partitions, the first reason.

    `states` begin and end regions, of which every partition has its own.
    """
    found: Dependencies = {}
    for node, partition in assignment.items():
        if node in states:
            continue
        for source in node.all_input_nodes:
            producer = assignment.get(source)
            if producer is not None and producer is not partition:
                found.setdefault((producer, partition), OrderReason(source, node, "reads"))
    for reason in hazards(graph, attributes.find):
        before, after = assignment.get(reason.before), assignment[reason.after]
        if before is not None and before is not after:
            found.setdefault((before, after), reason)
    return found


def merge(assignment: Assignment, groups: Iterable[Collection[Partition]]) -> Assignment:
    """Merges each group into one partition, named like its first member."""
    rank = {partition: index for index, partition in enumerate(distinct(assignment))}
    first = {member: min(group, key=rank.__getitem__) for group in groups for member in group}
    result = {node: first.get(partition, partition) for node, partition in assignment.items()}
    for partition in distinct(result):
        partition.nodes = []
    for node, partition in result.items():
        partition.nodes.append(node)
    return result
