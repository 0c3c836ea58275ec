"""Graphs at the edge: without calls, dead code, odd places of attributes, branches, odd names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.partition import Partition, split_module
from partitions import by_name, children, ops


def graph_module(build: Callable[[fx.Graph], None], **attributes: Any) -> fx.GraphModule:
    graph = fx.Graph()
    build(graph)
    return fx.GraphModule(attributes, graph)


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_graph_without_calls(keep_original_order: bool) -> None:
    module = fx.symbolic_trace(lambda x: (x,))
    split = split_module(module, None, lambda n: 0, keep_original_order=keep_original_order)
    assert ops(split) == ["placeholder x", "output output"]
    assert split(3) == (3,)


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_graph_that_returns_an_attribute(keep_original_order: bool) -> None:
    module = graph_module(lambda graph: graph.output(graph.get_attr("w")), w=torch.ones(2))
    split = split_module(module, None, lambda n: 0, keep_original_order=keep_original_order)
    assert split() is module.w


def test_empty_graphs() -> None:
    assert split_module(graph_module(lambda graph: None), None, lambda n: 0)() is None
    assert split_module(graph_module(lambda graph: graph.output(7)), None, lambda n: 0)() == 7


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_get_attr_between_placeholders(keep_original_order: bool) -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        w = graph.get_attr("w")
        y = graph.placeholder("y")
        first = graph.call_function(torch.add, (x, w))
        graph.output((graph.call_function(torch.mul, (first, y)), w))

    module = graph_module(build, w=torch.randn(2))
    split = split_module(
        module, None, lambda node: node.name, keep_original_order=keep_original_order
    )
    kinds = [node.op for node in split.graph.nodes]
    assert kinds[:2] == ["placeholder", "placeholder"] and "placeholder" not in kinds[2:]
    x, y = torch.randn(2, 2)
    assert torch.equal(split(x, y)[0], module(x, y)[0])


def test_attributes_are_read_where_the_order_asks_for() -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        first = graph.call_function(torch.sin, (graph.get_attr("a"),))
        second = graph.call_function(torch.cos, (graph.get_attr("b"),))
        graph.output((x, first, second, graph.get_attr("c")))

    module = graph_module(build, a=torch.ones(1), b=torch.ones(1), c=torch.ones(1))
    early = split_module(module, None, lambda node: node.name)
    late = split_module(module, None, lambda node: node.name, keep_original_order=True)
    assert " ".join(n.name for n in early.graph.nodes) == "x a b c submod_sin submod_cos output"
    assert " ".join(n.name for n in late.graph.nodes) == "x a submod_sin b submod_cos c output"


def test_dead_code_and_partitions_without_outputs() -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        graph.get_attr("unread")
        dead = graph.call_function(torch.sin, (x,))
        graph.call_function(torch.cos, (dead,))
        graph.call_module("layer", (x,))
        graph.output(x)

    module = graph_module(build, unread=torch.ones(1), layer=nn.Linear(2, 2))
    module.add_module("uncalled", nn.Linear(3, 3))
    names: dict[str, str] = {}
    split = split_module(module, None, lambda node: node.name, names)
    assert [*children(split)] == ["submod_sin", "submod_cos", "submod_layer"]
    assert split.submod_cos(torch.ones(2)) == split.submod_layer(torch.ones(2)) == ()
    assert names == {"submod_layer.layer": "layer"}
    x = torch.randn(2)
    assert split(x) is x


def test_several_results_cross_a_boundary() -> None:
    def f(x: Tensor) -> Any:
        values, indices = torch.topk(x, 2)
        left, right = torch.split(values, 1)
        return left + right, indices, torch.split(indices, 1)

    module = fx.symbolic_trace(f)
    split = split_module(module, None, lambda node: node.name)
    x = torch.randn(5)
    for ours, theirs in zip(split(x), module(x), strict=True):
        assert str(ours) == str(theirs)


def test_branches_are_part_of_the_partition() -> None:
    class Model(nn.Module):
        def forward(self, flag: Tensor, x: Tensor, y: Tensor) -> Tensor:
            x = torch.cond(flag, lambda a: a.sin(), lambda a: a.cos(), (x,))
            return torch.cond(flag, lambda a, b: a + b, lambda a, b: a * b, (x, y))

    x, y = torch.randn(2, 3)
    module = torch.export.export(Model(), (torch.tensor(True), x, y)).module(check_guards=False)
    branches = {n for n in module.graph.nodes if n.op == "get_attr"}
    assert len(branches) == 4
    calls = [n for n in module.graph.nodes if n.op.startswith("call")]
    names: dict[str, str] = {}
    split = split_module(module, None, lambda node: int(calls.index(node) > 1), names)
    assert not split.graph.find_nodes(op="get_attr")
    for child in children(split).values():
        kinds = [node.op for node in child.graph.nodes]
        assert "placeholder" not in kinds[kinds.index("get_attr") :]
        assert kinds.count("get_attr") == 2
    assert sorted(names.values()) == sorted(str(n.target) for n in branches)
    for flag in (torch.tensor(True), torch.tensor(False)):
        assert torch.equal(split(flag, x, y), module(flag, x, y))


def test_branches_may_be_called_as_partitions_are() -> None:
    body = fx.symbolic_trace(lambda x: x + 1)

    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        call = graph.call_function(lambda module, x: module(x), (graph.get_attr("submod_0"), x))
        graph.output(call)

    module = graph_module(build, submod_0=body)
    split = split_module(module, None, lambda node: 0)
    assert split.submod_0.submod_0 is body
    assert split(2) == 3


# ------------------------------------------------------------------------- names and refusals


def test_partition_names() -> None:
    module = fx.symbolic_trace(lambda x: x.sin().cos().tan())
    split = split_module(module, None, by_name(sin=0.5, cos="0_5", tan="a b"))
    assert [*children(split)] == ["submod_0_5", "submod_0_5_1", "submod_a b"]
    x = torch.randn(2)
    assert torch.equal(split(x), module(x))


def test_a_child_does_not_hide_what_every_module_has() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.print = nn.Module()
            self.print.readable = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.print.readable(x)

    split = split_module(fx.symbolic_trace(Model()), None, lambda node: 0)
    assert "Linear" in str(split.submod_0.print_readable_1)


def test_a_name_that_stays_outside_is_taken() -> None:
    def build(graph: fx.Graph) -> None:
        graph.output(graph.call_function(torch.sin, (graph.get_attr("submod_0"),)))

    module = graph_module(build, submod_0=torch.ones(2))
    with pytest.raises(graphopt.PartitionError, match="partition 0 would be called submod_0"):
        split_module(module, None, lambda node: 0)
    assert gc.isenabled()


def test_the_garbage_collector_is_left_as_it_was() -> None:
    module = fx.symbolic_trace(lambda x: x.sin())
    split_module(module, None, lambda node: 0)
    assert gc.isenabled()
    gc.disable()
    try:
        split_module(module, None, lambda node: 0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_callback_that_returns_nothing() -> None:
    module = fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(graphopt.PartitionError, match="returned no partition for %sin"):
        split_module(module, None, lambda node: None)


def test_an_unknown_way_with_cycles() -> None:
    module = fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(ValueError, match="on_cycle is"):
        split_module(module, None, lambda node: 0, on_cycle="ignore")  # type: ignore[arg-type]


def test_partition_is_public() -> None:
    assert Partition("0", "submod_0").inputs == []
