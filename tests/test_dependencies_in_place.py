"""Dependencies through storage: updates in place, as in a raw trace, and collectives."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from graphopt.iter_graph import copy_graph
from graphopt.verify import check_dependencies

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def in_place_trace() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """What a trace without functional form looks like: writes, and reads through other names."""
    graph = fx.Graph()
    n: dict[str, fx.Node] = {name: graph.placeholder(name) for name in ("p", "q", "g", "h")}

    def add(name: str, target: Any, *args: Any) -> None:
        n[name] = graph.create_node("call_function", target, args, name=name)

    add("view", aten.t.default, n["p"])
    add("early", aten.neg.default, n["view"])
    add("add", aten.add_.Tensor, n["p"], n["g"])
    add("late", aten.neg.default, n["view"])
    add("lists", aten._foreach_mul_.List, [n["p"], n["q"]], [n["g"], n["h"]])
    add("read_p", aten.neg.default, n["p"])
    add("read_q", aten.neg.default, n["q"])
    graph.output(([n["early"], n["late"], n["read_p"], n["read_q"]], [], []))
    return graph, n


def test_updates_in_place_keep_their_readers() -> None:
    graph, _ = in_place_trace()
    assert check_dependencies(graph, graph).ok


@pytest.mark.parametrize(
    ("moved", "after", "said"),
    [
        ("early", "add", "%early reads %view after %add has overwritten it"),
        ("late", "early", "%late stands before %add now, which it needs"),
        (
            "read_p",
            "late",
            "%read_p reads %p after %add has overwritten it, and not what %lists wrote there",
        ),
        ("lists", "early", "now in the other order"),
    ],
)
def test_reads_and_writes_of_one_storage_keep_their_order(
    moved: str, after: str, said: str
) -> None:
    graph, nodes = in_place_trace()
    before, copies = copy_graph(graph)
    nodes[after].append(nodes[moved])
    report = check_dependencies(before, graph, correspondence=copies)
    assert said in str(report)


def test_list_writes_are_read_element_by_element() -> None:
    graph, nodes = in_place_trace()
    before, copies = copy_graph(graph)
    lists = nodes["lists"]
    lists.args = ([nodes["p"], nodes["q"]], [nodes["h"], nodes["g"]])
    report = check_dependencies(before, graph, correspondence=copies)
    assert "%read_q does not depend on %h any more" in str(report)


def test_a_collective_in_place_is_read_after_its_wait() -> None:
    graph = fx.Graph()
    x, p = graph.placeholder("x"), graph.placeholder("p")
    launch = graph.call_function(c10d.all_reduce_.default, (x, "sum", "0"))
    graph.call_function(c10d.wait_tensor.default, (launch,))
    reader = graph.call_function(aten.add.Tensor, (x, p))
    graph.output(([reader], [], []))
    before, copies = copy_graph(graph)
    assert check_dependencies(before, graph, correspondence=copies).ok
    launch.append(reader)
    report = check_dependencies(before, graph, correspondence=copies)
    assert "%add_tensor reads %x while %all_reduce__default is under way" in str(report)


def test_coalesced_collectives_have_a_wait_for_each_result() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xy"]
    for node in inputs:
        node.meta["val"] = torch.empty(3, device="meta")
    launch = graph.call_function(c10d.all_reduce_coalesced.default, (inputs, "sum", "0"))
    launch.meta["val"] = [torch.empty(3, device="meta") for _ in inputs]
    items = [graph.call_function(operator.getitem, (launch, index)) for index in range(2)]
    waits = [graph.call_function(c10d.wait_tensor.default, (item,)) for item in items]
    graph.output((waits, [], []))
    before, copies = copy_graph(graph)
    assert check_dependencies(before, graph, correspondence=copies).ok
    waits[0].args, waits[1].args = waits[1].args, waits[0].args
    report = check_dependencies(before, graph, correspondence=copies)
    assert "result 0 of the step does not get %x through" in str(report)
    waits[0].args = waits[1].args
    report = check_dependencies(before, graph, correspondence=copies)
    assert "has 0 waits for result 1" in str(report) or "has 0 waits for result 0" in str(report)
