"""Planning of a split: from a callback to ordered partitions."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
from torch import fx

from graphopt.partition.assignment import (
    Dependencies,
    Partition,
    SplitCallback,
    assign,
    distinct,
    find_dependencies,
    merge,
)
from graphopt.partition.boundaries import Boundaries
from graphopt.partition.module_attributes import Attributes
from graphopt.partition.ordering import (
    PartitionCycleError,
    check_order,
    cyclic_groups,
    first_cycle,
    stable_order,
)
from graphopt.partition.regions import RegionBounds, find_regions, find_states


@dataclass
class PartitionPlan:
    """Partitions in running order, with a flag if that is the order asked for."""

    order: list[Partition]
    regions: RegionBounds
    in_original_order: bool


def make_plan(
    graph: fx.Graph,
    attributes: Attributes,
    split_callback: SplitCallback,
    affix: str | None,
    *,
    keep_original_order: bool,
    merge_cycles: bool,
) -> PartitionPlan:
    """Assigns, orders and connects partitions without changing the graph."""
    states = find_states(graph)
    assignment = assign(graph, split_callback, affix)
    regions = find_regions(assignment, states)
    dependencies = find_dependencies(graph, attributes, assignment, states)
    order = stable_order(distinct(assignment), dependencies)
    if order is None and merge_cycles:
        assignment = merge(assignment, cyclic_groups(dependencies))
        dependencies = find_dependencies(graph, attributes, assignment, states)
        order = stable_order(distinct(assignment), dependencies)
    if order is None:
        raise PartitionCycleError(first_cycle(distinct(assignment), dependencies), dependencies)
    if keep_original_order:
        order = distinct(assignment)
        check_order(order, dependencies)
    _connect(order, dependencies)
    Boundaries(graph, attributes, assignment, order).find(states)
    return PartitionPlan(order, regions, keep_original_order)


def _connect(partitions: list[Partition], dependencies: Dependencies) -> None:
    for partition in partitions:
        partition.dependencies, partition.dependents = [], []
    for before, after in dependencies:
        after.dependencies.append(before.name)
        before.dependents.append(after.name)


def partition_graph(m: fx.GraphModule, split_callback: SplitCallback) -> nx.DiGraph:
    """Returns the dependency graph of the partitions, even if it has cycles.

    Nodes are names of partitions, in order of first appearance, with the attribute `partition`, a
    `Partition`. An edge leads to a partition that has to run later; its attributes are `reason`,
    the first reason as text, and `values`, the nodes whose values are passed along it.

    >>> model = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
    >>> graph = graphopt.partition.partition_graph(model, lambda node: node.name)
    >>> list(graph.edges)
    [('_0', '_1')]
    """
    states = find_states(m.graph)
    assignment = assign(m.graph, split_callback)
    attributes = Attributes(m, None)
    dependencies = find_dependencies(m.graph, attributes, assignment, states)
    partitions = distinct(assignment)
    _connect(partitions, dependencies)
    order = stable_order(partitions, dependencies) or partitions
    Boundaries(m.graph, attributes, assignment, order).find(states)
    graph = nx.DiGraph()
    for partition in partitions:
        graph.add_node(partition.name, partition=partition)
    for (before, after), reason in dependencies.items():
        graph.add_edge(before.name, after.name, reason=str(reason), values=[])
    for partition in partitions:
        for source in partition.inputs:
            if source in assignment:
                edge = graph.edges[assignment[source].name, partition.name]
                edge["values"].append(source)
    return graph
