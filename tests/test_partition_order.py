"""In which order partitions run, which orders are refused, and what the networkx view shows."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.partition import PartitionCycleError, partition_graph, split_module
from partitions import by_name


def order(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.find_nodes(op="call_module")]


def independent(count: int) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.sin, (x,)) for _ in range(count)))
    return fx.GraphModule({}, graph)


def crossing() -> fx.GraphModule:
    """The first partition reads what the second computes."""

    def f(x: Tensor) -> Tensor:
        return x.sin() + x.cos()

    return fx.symbolic_trace(f)


LATER = by_name(sin="early", cos="late", add="early")


# ------------------------------------------------------------------------- the order


def test_first_appearance_first() -> None:
    module = independent(5)
    split = split_module(module, None, lambda node: node.name)
    assert order(split) == ["submod_sin", *(f"submod_sin_{i}" for i in range(1, 5))]


def test_dependencies_come_before_appearance() -> None:
    split = split_module(crossing(), None, LATER)
    assert order(split) == ["submod_late", "submod_early"]
    x = torch.randn(3)
    assert torch.equal(split(x), crossing()(x))


def test_original_order_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(graphopt.PartitionError) as caught:
        split_module(crossing(), None, LATER, keep_original_order=True)
    assert str(caught.value) == (
        "the original order of partitions cannot be kept: early comes before late\n"
        "  late -> early:  %add reads %cos\n"
        "  hint:  leave keep_original_order out to have them ordered by what they read"
    )


# ------------------------------------------------------------------------- cycles


def cyclic() -> fx.GraphModule:
    def f(x: Tensor) -> Tensor:
        a = x + 1
        b = a * 2
        c = b.sin()
        return a - c

    return fx.symbolic_trace(f)


THREE = by_name(add=0, mul=1, sin=2, sub=0)


def test_cycle_is_printed_with_an_edge_for_each_step() -> None:
    with pytest.raises(graphopt.PartitionError) as caught:
        split_module(cyclic(), None, THREE)
    assert str(caught.value) == (
        "partitions depend on each other: 0 -> 1 -> 2 -> 0\n"
        "  0 -> 1:  %mul reads %add\n"
        "  1 -> 2:  %sin reads %mul\n"
        "  2 -> 0:  %sub reads %sin\n"
        '  hint:  give these nodes one partition, or pass on_cycle="merge"'
    )
    assert isinstance(caught.value, PartitionCycleError)
    assert caught.value.cycle == ["0", "1", "2"]


def test_the_users_line_is_shown() -> None:
    model = nn.Linear(2, 2)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sin().cos()

    module = graphopt.capture(step, model, torch.randn(2)).graph_module
    with pytest.raises(PartitionCycleError, match=r"from:  .*\.py:\d+  return model\(x\).sin"):
        split_module(module, None, lambda node: node.name == "sin")


def test_the_shortest_cycle_is_shown() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sin()
        b = a.cos()
        c = b.tan()
        return (c + a) * b

    module = fx.symbolic_trace(f)
    with pytest.raises(PartitionCycleError) as caught:
        split_module(module, None, by_name(sin=0, cos=1, tan=2, add=3, mul=0))
    assert caught.value.cycle == ["0", "1"]


def test_cycles_merge() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.exp()
        b = a + 1
        c = b * 2
        return (b - c).tanh()

    module = fx.symbolic_trace(f)
    names = {"exp": "in", "add": "p", "mul": "q", "sub": "p", "tanh": "out"}
    split = split_module(module, None, lambda n: names[n.name], on_cycle="merge")
    assert order(split) == ["submod_in", "submod_p", "submod_out"]
    assert [n.name for n in split.submod_p.graph.nodes][1:-1] == ["add", "mul", "sub"]
    x = torch.randn(3)
    assert torch.equal(split(x), module(x))


def test_independent_cycles_merge_apart() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        a, b = x.sin(), y.cos()
        return a + a.exp(), b + b.tan()

    module = fx.symbolic_trace(f)
    split = split_module(
        module, None, by_name(sin=0, cos=1, exp=2, add=0, tan=3, add_1=1), on_cycle="merge"
    )
    assert order(split) == ["submod_0", "submod_1"]


def test_many_partitions_in_a_row() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(3000):
        value = graph.call_function(torch.sin, (value,))
    graph.output(value)
    module = fx.GraphModule({}, graph)
    number = {node: index for index, node in enumerate(graph.nodes)}
    with pytest.raises(PartitionCycleError) as caught:
        split_module(module, None, lambda node: number[node] % 2999)
    assert len(caught.value.cycle) == 2999


# ------------------------------------------------------------------------- the view


def test_view_of_partitions() -> None:
    view = partition_graph(crossing(), LATER)
    assert isinstance(view, nx.DiGraph)
    assert list(view) == ["early", "late"]
    assert list(view.edges) == [("late", "early")]
    edge = view.edges["late", "early"]
    assert edge["reason"] == "%add reads %cos"
    assert [node.name for node in edge["values"]] == ["cos"]
    early, late = (view.nodes[name]["partition"] for name in view)
    assert [node.name for node in early.nodes] == ["sin", "add"]
    assert [node.name for node in early.inputs] == ["x", "cos"]
    assert [node.name for node in early.outputs] == ["add"]
    assert (early.dependencies, early.dependents) == (["late"], [])
    assert (late.dependencies, late.dependents) == ([], ["early"])
    assert late.submod_name == "submod_late"


def test_view_of_a_cycle() -> None:
    view = partition_graph(cyclic(), THREE)
    assert [sorted(cycle) for cycle in nx.simple_cycles(view)] == [["0", "1", "2"]]
