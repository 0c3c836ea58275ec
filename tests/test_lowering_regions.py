"""Regions: which nodes are compiled together, and that nothing else changes."""

from __future__ import annotations

import logging
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphopt.graph_utils import get_outputs, is_collective, is_wait
from graphopt.lowering.extract import LoweredRegion, RegionCut, region_graphs
from graphopt.lowering.regions import MARK, mark_regions
from sketch import Sketch, one_rank, values_for
from slices import examples

aten = torch.ops.aten


def chain(sketch: Sketch, value: fx.Node, length: int = 6) -> fx.Node:
    for _ in range(length):
        value = sketch.call(aten.sin.default, value)
    return value


def regions(gm: fx.GraphModule, **options: object) -> list[list[str]]:
    found = mark_regions(gm.graph, **options)  # type: ignore[arg-type]
    return [[node.name for node in nodes] for nodes in found.nodes]


def spliced(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its marked regions called as plain modules, not compiled."""
    root = fx.GraphModule(gm, gm.graph)

    def call(graph: fx.Graph, region: LoweredRegion, inputs: list[fx.Node]) -> fx.Node:
        name = f"subgraph_{sum(node.op == 'call_module' for node in graph.nodes)}"
        root.add_submodule(name, fx.GraphModule({}, region.graph))
        return graph.call_module(name, tuple(inputs))

    root.graph = RegionCut(gm.graph).splice(call)
    root.graph.lint()
    root.recompile()
    return root


def assert_same_results(gm: fx.GraphModule, values: list[torch.Tensor]) -> fx.GraphModule:
    def run(module: fx.GraphModule) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        given = [value.clone() for value in values]
        torch.manual_seed(0)
        results = torch.utils._pytree.tree_leaves(module(*given))
        return results, given

    mark_regions(gm.graph, min_ops=1)
    lowered = spliced(gm)
    for before, after in zip(run(gm), run(lowered), strict=True):
        assert all(map(torch.equal, before, after))
    return lowered


def test_a_node_between_breaks_no_region() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    first = chain(sketch, x)
    drawn = sketch.call(aten.bernoulli.p, y, 0.5)
    last = chain(sketch, first)
    gm = sketch.step([last, drawn])
    assert [len(names) for names in regions(gm)] == [12]
    assert_same_results(gm, values_for(gm))


def test_no_way_out_of_a_region_and_back() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = chain(sketch, x)
    drawn = sketch.call(aten.bernoulli.p, first, 0.5)
    last = sketch.call(aten.add.Tensor, chain(sketch, first), drawn)
    gm = sketch.step([chain(sketch, last)])
    assert [len(names) for names in regions(gm, min_ops=1)] == [12, 7]
    assert_same_results(gm, values_for(gm))


def test_a_mask_needs_only_the_shape_of_what_it_masks() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = chain(sketch, x)
    drawn = sketch.call(aten.bernoulli.p, sketch.call(aten.empty_like.default, first), 0.5)
    last = sketch.call(aten.mul.Tensor, first, drawn)
    gm = sketch.step([last])
    assert [len(names) for names in regions(gm, min_ops=1)] == [7]
    assert_same_results(gm, values_for(gm))


def test_random_numbers_keep_their_order() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 64), sketch.input("y", 64)
    first = sketch.call(aten.bernoulli.p, chain(sketch, x), 0.5)
    second = sketch.call(aten.bernoulli.p, y, 0.5)
    gm = sketch.step([chain(sketch, first), chain(sketch, second)])
    lowered = assert_same_results(gm, values_for(gm))
    drawing = [node.name for node in lowered.graph.nodes if node.target is aten.bernoulli.p]
    assert drawing == [first.name, second.name]


def test_what_follows_a_launch_does_not_delay_it() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    launch = sketch.all_reduce(chain(sketch, x))
    hidden = chain(sketch, y)
    wait = sketch.wait(launch)
    gm = sketch.step([wait, hidden])
    assert [len(names) for names in regions(gm, min_ops=1)] == [6, 6]
    names = [node.name for node in spliced(gm).graph.nodes]
    order = ["subgraph_0", launch.name, "subgraph_1", wait.name]
    assert sorted(order, key=names.index) == order


def test_an_independent_launch_breaks_no_region() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    first = chain(sketch, x)
    launch = sketch.all_reduce(y)
    last = chain(sketch, first)
    wait = sketch.wait(launch)
    gm = sketch.step([last, wait])
    assert [len(names) for names in regions(gm)] == [12]
    names = [node.name for node in spliced(gm).graph.nodes]
    order = [launch.name, "subgraph_0", wait.name]
    assert sorted(order, key=names.index) == order


def test_containers_do_not_cross_the_boundary() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4, 6), sketch.input("y", 6)
    halves = sketch.call(aten.split.Tensor, chain(sketch, x), 2)
    items = [sketch.call(operator.getitem, halves, i) for i in range(2)]
    normed = sketch.call(aten.native_layer_norm.default, x, [6], y, None, 1e-5)
    leaves = [sketch.call(operator.getitem, normed, i) for i in range(3)]
    gm = sketch.step([*items, *leaves])
    lowered = assert_same_results(gm, values_for(gm))
    (body,) = region_graphs(gm, min_ops=1)
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in output.args[0])
    assert [n.target for n in lowered.graph.nodes if n.target is aten.split.Tensor]


def test_constants_are_inputs() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    added = sketch.call(aten.add.Tensor, x, x)
    gm = sketch.step([chain(sketch, added)])
    gm.table = torch.arange(4.0)
    with gm.graph.inserting_before(added):
        table = gm.graph.create_node("get_attr", "table")
    table.meta["val"] = x.meta["val"]
    added.args = (x, table)
    gm.recompile()
    lowered = assert_same_results(gm, values_for(gm))
    (call,) = (node for node in lowered.graph.nodes if node.op == "call_module")
    assert [source.op for source in call.args] == ["placeholder", "get_attr"]


def test_updates_keep_their_place_among_reads() -> None:
    sketch = Sketch()
    state, x = sketch.input("state", 4), sketch.input("x", 4)
    old = chain(sketch, state)
    update = sketch.call(aten.copy_.default, state, chain(sketch, x))
    new = chain(sketch, update)
    gm = sketch.step([old, new], [update])
    assert [len(names) for names in regions(gm, min_ops=1)] == [19]
    lowered = assert_same_results(gm, values_for(gm))
    assert get_outputs(lowered.graph).updates == []


def test_an_update_that_the_compiler_would_not_see_through_stays() -> None:
    sketch = Sketch()
    state, x = sketch.input("state", 4), sketch.input("x", 4)
    view = sketch.call(aten.view.default, state, [4])
    old = chain(sketch, view)
    update = sketch.call(aten.copy_.default, state, chain(sketch, x))
    gm = sketch.step([old], [update])
    seen = mark_regions(gm.graph, min_ops=1, node_predicate=lambda node: node is not view)
    reasons = {entry.node: entry.reason for entry in seen.breaks}
    assert reasons[update.name] == "its state is also reached through other values"
    assert [len(names) for names in regions(gm, min_ops=1)] == [13]


def test_in_place_operators_of_other_graphs_keep_their_place() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    first = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.add_.Tensor, (first, 1))
    last = graph.call_function(aten.sin.default, (first,))
    graph.output((first, last))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(4))
    gm = fx.GraphModule({}, graph)
    assert_same_results(gm, [torch.ones(4)])


def test_predicates() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = chain(sketch, x)
    other = sketch.call(aten.cos.default, first)
    gm = sketch.step([chain(sketch, other)])
    asked: list[list[fx.Node]] = []

    def refuse(nodes: list[fx.Node]) -> bool:
        asked.append(nodes)
        return False

    assert regions(gm, subgraph_predicate=refuse) == []
    assert [len(nodes) for nodes in asked] == [13]
    without = regions(gm, node_predicate=lambda n: n.target is not aten.cos.default, min_ops=1)
    assert [len(names) for names in without] == [6, 6]
    asked.clear()
    assert regions(gm, node_predicate=lambda n: False, subgraph_predicate=refuse) == []
    assert asked == []


def test_small_regions_stay(caplog: pytest.LogCaptureFixture) -> None:
    sketch = Sketch()
    gm = sketch.step([chain(sketch, sketch.input("x", 4), 9)])
    found = mark_regions(gm.graph)
    assert found.nodes == []
    with caplog.at_level(logging.INFO, "graphopt"):
        found.log()
    assert "its region has 9 operators, fewer than 10" in caplog.text
    assert "aten.sin.default" in caplog.text
    assert regions(gm, min_ops=9) != []


def test_every_break_has_its_reason() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    drawn = sketch.call(aten.bernoulli.p, x, 0.5)
    reduced = sketch.wait(sketch.all_reduce(drawn))
    gm = sketch.step([reduced], [sketch.call(aten.copy_.default, x, reduced)])
    found = {entry.target: entry.reason for entry in mark_regions(gm.graph).breaks}
    assert found == {
        "aten.bernoulli.p": "it draws random numbers",
        "_c10d_functional.all_reduce.default": "it communicates",
        "_c10d_functional.wait_tensor.default": "it communicates",
        "aten.copy_.default": "what it writes is computed elsewhere",
    }


@st.composite
def programs(draw: st.DrawFn) -> fx.GraphModule:
    """Random graphs of compute, views, random numbers, updates, launches and waits."""
    sketch = Sketch()
    inputs = [sketch.input(f"x{i}", 4, 4) for i in range(3)]
    state = sketch.input("state", 4, 4)
    values, launched, updates = list(inputs), [], []
    for _ in range(draw(st.integers(5, 40))):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        kind = draw(st.sampled_from(["add", "t", "mm", "mask", "launch", "wait", "update", "like"]))
        if kind == "add":
            values.append(sketch.call(aten.add.Tensor, a, b))
        elif kind == "t":
            values.append(sketch.call(aten.t.default, a))
        elif kind == "mm":
            values.append(sketch.call(aten.mm.default, a, b))
        elif kind == "like":
            values.append(sketch.call(aten.ones_like.default, a))
        elif kind == "mask":
            values.append(sketch.call(aten.bernoulli.p, a, 0.5))
        elif kind == "launch":
            launched.append(sketch.all_reduce(a))
        elif kind == "wait" and launched:
            values.append(sketch.wait(launched.pop(draw(st.integers(0, len(launched) - 1)))))
        elif kind == "update" and not updates:
            updates.append(sketch.call(aten.copy_.default, state, a))
            values.append(updates[0])
    values += [sketch.wait(launch) for launch in launched]
    results = draw(st.lists(st.sampled_from(values[3:] or values), min_size=1, max_size=6))
    return sketch.step(results, updates)


def flat_order(gm: fx.GraphModule) -> dict[str, int]:
    """When each call of a marked graph runs, those of a region as one moment after another."""
    order = RegionCut(gm.graph).ordered
    return {node.name: index for index, node in enumerate(order)}


@settings(max_examples=examples(60), deadline=None)
@given(programs())
def test_any_program_computes_the_same(gm: fx.GraphModule) -> None:
    with one_rank():
        assert_same_results(gm, [torch.rand(4, 4) for _ in range(4)])


@settings(max_examples=examples(100), deadline=None)
@given(programs())
def test_communication_is_not_delayed_and_stays_hidden(gm: fx.GraphModule) -> None:
    mark_regions(gm.graph, min_ops=1)
    before = {node: index for index, node in enumerate(gm.graph.nodes)}
    after = {node: index for index, node in enumerate(RegionCut(gm.graph).ordered)}
    calls = [node for node in before if node.op == "call_function" and not is_free(node)]
    for launch in filter(is_collective, calls):
        assert not [
            n
            for n in calls
            if before[n] > before[launch] and after[n] < after[launch] and n.meta[MARK].region >= 0
        ]
        (wait,) = filter(is_wait, launch.users)
        hidden = {n for n in calls if before[launch] < before[n] < before[wait]}
        assert hidden <= {n for n in calls if after[launch] < after[n] < after[wait]}


def is_free(node: fx.Node) -> bool:
    return bool(node.meta[MARK].free)
