"""The dependency graph has every order that must be kept, and says of which kind it is."""

from __future__ import annotations

import operator
from itertools import pairwise

import networkx as nx
import pytest
import torch
from torch import fx

from graphopt.iter_graph import IterGraphModule
from graphopt.verify import dependency_graph
from graphs import step_of_size, training_step
from rewrites import nodes_of, reduced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def hazards(graph: nx.DiGraph, earlier: fx.Node, later: fx.Node) -> set[str]:
    return graph.edges[earlier, later].get("hazard", set())


def test_nodes_and_their_attributes() -> None:
    step = training_step(2, width=8, batch=4)
    graph = dependency_graph(step)
    assert list(graph.nodes) == list(step.graph.nodes)
    assert nx.is_directed_acyclic_graph(graph)
    gelu = nodes_of(step, aten.gelu.default)[0]
    assert graph.nodes[gelu] == {
        "op": "aten.gelu.default",
        "bytes": 4 * 8 * 4,
        "phase": "forward",
        "iteration": 0,
    }
    lr = next(node for node in step.graph.nodes if node.target == "lr")
    assert (graph.nodes[lr]["op"], graph.nodes[lr]["bytes"]) == ("placeholder", 8)
    item = nodes_of(step, operator.getitem)[0]
    assert graph.nodes[item]["op"] == "getitem"
    fused = nodes_of(step, aten._fused_adamw.tensor_lr)[0]
    assert graph.nodes[fused]["bytes"] == 4 * 2 * (8 * 8 + 8) * 4


def test_a_collective_sends_until_its_wait() -> None:
    step = training_step(1)
    wait = reduced(step)[0]
    launch = wait.args[0]
    with step.graph.inserting_after(wait):
        overwrite = step.graph.call_function(aten.zero_.default, (launch.args[0],))
    graph = dependency_graph(step)
    assert graph.edges[launch, wait]["kind"] == {"data", "collective"}
    assert graph.edges[launch.args[0], launch]["kind"] == {"data"}
    assert graph.edges[wait, overwrite] == {"kind": {"storage"}, "hazard": {"WAR"}}


def test_updates_come_after_all_reads_of_the_old_value() -> None:
    step = training_step(1, optimizer="loop", ranks=None)
    graph = dependency_graph(step)
    weight = next(node for node in step.graph.nodes if node.target == "p0_weight")
    update = next(n for n in nodes_of(step, aten.copy_.default) if n.args[0] is weight)
    linear = nodes_of(step, aten.addmm.default)[0]
    assert hazards(graph, linear, update) == {"WAR"}  # it reads a view of the weight
    assert hazards(graph, update.args[1], update) == {"WAR"}
    assert graph.edges[update.args[1], update]["kind"] == {"data", "storage"}


def test_views_do_not_read_and_results_of_lists_are_no_views() -> None:
    step = training_step(2, optimizer="foreach")
    graph = dependency_graph(step)
    kinds = {
        (a.target, b.target): data["kind"]
        for a, b, data in graph.edges(data=True)
        if "storage" in data["kind"]
    }
    assert kinds
    assert all(later is aten.copy_.default for _, later in kinds)
    assert (operator.getitem, aten.copy_.default) not in kinds


def test_random_nodes_are_a_chain() -> None:
    step = training_step(3, dropout=True)
    drawn = nodes_of(step, aten.native_dropout.default)
    graph = dependency_graph(step)
    chain = [(a, b) for a, b, data in graph.edges(data=True) if "rng" in data["kind"]]
    assert chain == list(pairwise(drawn))


def test_a_raw_trace() -> None:
    graph = fx.Graph()
    p, g = graph.placeholder("p"), graph.placeholder("g")
    view = graph.call_function(aten.t.default, (p,))
    early = graph.call_function(aten.neg.default, (view,))
    add = graph.call_function(aten.add_.Tensor, (p, g))
    zero = graph.call_function(aten.zero_.default, (view,))
    late = graph.call_function(aten.neg.default, (add,))
    graph.output((early, late))
    found = dependency_graph(graph)
    assert hazards(found, early, add) == {"WAR"}
    assert hazards(found, add, zero) == {"RAW", "WAW"}
    assert hazards(found, zero, late) == {"RAW"}
    assert not found.has_edge(add, view)


def test_values_without_metadata_and_of_unknown_size() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_function(operator.add, (1, 2))
    module = graph.call_module("layer", (x,))
    graph.output(([number, module], [], []))
    found = dependency_graph(fx.GraphModule({"layer": torch.nn.ReLU()}, graph))
    assert [found.nodes[node]["op"] for node in (x, number, module)] == [
        "placeholder",
        "add",
        "call_module",
    ]
    assert found.nodes[x]["bytes"] == 0 and found.nodes[x]["phase"] is None


def test_late_nodes_belong_to_the_next_iteration() -> None:
    step = IterGraphModule(training_step(2, optimizer="loop", ranks=None))
    first = nodes_of(step, aten.t.default)[0]
    update = next(n for n in nodes_of(step, aten.copy_.default) if n.args[0].target == "p0_weight")
    step.graph.move_to_next_iter_before([update], first)
    iterations = nx.get_node_attributes(dependency_graph(step), "iteration")
    assert [node for node, iteration in iterations.items() if iteration] == [update]


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop"])
def test_the_number_of_edges_is_linear(optimizer: str) -> None:
    def per_node(nodes: int) -> float:
        graph = dependency_graph(step_of_size(nodes, optimizer=optimizer))
        return graph.number_of_edges() / graph.number_of_nodes()

    assert per_node(4000) < 1.1 * per_node(1000)
