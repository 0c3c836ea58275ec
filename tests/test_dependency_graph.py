"""The dependency graph has every order that must be kept; rewrites that keep all are accepted."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx

from graphopt import PassManager, PassRegistry, VerificationError, graph_optimization_pass
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_output,
    get_outputs,
    is_collective,
    set_outputs,
)
from graphopt.ir.accesses import MemoryOrder
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.verify import check_dependencies, dependency_graph
from graphopt.verify.dependency.sources import GraphSources
from graphs import step_of_size, training_step
from rewrites import fuse, nodes_of, reduced, report_of, snapshot, split_list_operator, updates_of

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


OPTIMIZERS = ("fused", "foreach", "loop")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_keeps_its_own_dependencies(optimizer: str) -> None:
    step = training_step(3, optimizer=optimizer, dropout=True)
    report = check_dependencies(step, step)
    assert report.ok and report.problems == []
    assert str(report) == "the graph keeps every dependency"
    report.raise_for_failure()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3, 100])
def test_fusing_and_unfusing(optimizer: str, size: int) -> None:
    step = training_step(4, optimizer=optimizer)
    apart, copies = snapshot(step)
    fuse(step, size)
    assert check_dependencies(apart, step, correspondence=copies).ok
    assert check_dependencies(step, apart).ok


def test_scaling_a_bucket_once_and_buckets_of_buckets() -> None:
    step = training_step(4)
    before, _ = snapshot(step)
    for launch in nodes_of(step, c10d.all_reduce.default):
        launch.args = (launch.args[0].args[0], *launch.args[1:])
    step.graph.eliminate_dead_code()
    fuse(step, 3)
    for bucket in nodes_of(step, aten.cat.default):
        with step.graph.inserting_after(bucket):
            scaled = call_function_with_meta(step.graph, aten.mul.Tensor, (bucket, 0.5))
        bucket.replace_all_uses_with(scaled)
        scaled.args = (bucket, 0.5)
    assert check_dependencies(before, step).ok
    inner, _ = snapshot(step)
    fuse(step, 2)
    assert check_dependencies(inner, step).ok
    assert check_dependencies(before, step).ok


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_splitting_an_optimizer(optimizer: str) -> None:
    def split(step: fx.GraphModule) -> None:
        for target in (
            aten._foreach_add.Scalar,
            aten._foreach_add.List,
            aten._fused_adamw.tensor_lr,
        ):
            for node in nodes_of(step, target):
                split_list_operator(step, node, 3)

    assert report_of(training_step(4, optimizer=optimizer), split).ok


def test_a_returned_value_may_be_cloned_and_a_dead_copy_dropped() -> None:
    step = training_step(2)
    graph = step.graph
    value = next(iter(nodes_of(step, aten.gelu.default)))
    with graph.inserting_after(value):
        clone = call_function_with_meta(graph, aten.clone.default, (value,), like=value)
    with graph.inserting_after(clone):
        call_function_with_meta(graph, aten.copy_.default, (clone, value), like=value)

    def rewrite(step: fx.GraphModule) -> None:
        orphan = next(n for n in nodes_of(step, aten.copy_.default) if n not in updates_of(step))
        step.graph.erase_node(orphan)
        outputs = get_outputs(step.graph)
        with step.graph.inserting_before(get_output(step.graph)):
            again = call_function_with_meta(step.graph, aten.clone.default, (outputs.results[0],))
        set_outputs(step.graph, outputs._replace(results=[again]))

    assert report_of(step, rewrite).ok


def test_padding_is_not_lost_and_the_order_of_launches_is_free() -> None:
    def rewrite(step: fx.GraphModule) -> None:
        fuse(step, 4)
        bucket = nodes_of(step, aten.cat.default)[0]
        with step.graph.inserting_before(bucket):
            args = ([5], 0.0)
            zeros = call_function_with_meta(step.graph, aten.full.default, args, like=bucket)
        zeros.meta["val"] = bucket.meta["val"].new_zeros(5)
        bucket.args = ([*bucket.args[0], zeros],)
        bucket.meta["val"] = bucket.meta["val"].new_zeros(bucket.meta["val"].numel() + 5)
        first, *_, last = nodes_of(step, c10d.all_reduce.default)
        last.append(first)

    assert report_of(training_step(4), rewrite).ok


def test_late_nodes() -> None:
    step = IterGraphModule(training_step(2, optimizer="loop", ranks=None))
    graph = step.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    update = next(u for u in updates_of(step) if u.args[0].target == "p0_weight")
    new = update.args[1]

    def move(step: fx.GraphModule) -> None:
        graph.move_to_next_iter_before([new, update], first)

    assert report_of(step, move).ok
    with graph.inserting_after(new):
        reader = call_function_with_meta(graph, aten.neg.default, (new,))
    assert "runs one iteration later" in str(check_dependencies(graph, graph))
    graph.erase_node(reader)
    assert check_dependencies(graph, graph).ok


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_buckets_and_lists_are_followed_by_element(optimizer: str) -> None:
    """With twice the parameters in one bucket and one list, each update has as many sources."""

    def sources(layers: int) -> set[int]:
        step = training_step(layers, optimizer=optimizer)
        fuse(step, 10**6)
        graph, memory = step.graph, MemoryOrder(step.graph)
        inputs = graph.find_nodes(op="placeholder")
        gradients = [n for n in graph.nodes if n.target is aten.mul.Tensor]
        found = GraphSources(
            memory, [*inputs, *gradients], [*inputs, *gradients].index, cut=True, kinds=True
        )
        return {
            sum(bits.bit_count() for bits in found.of(write).values())
            for write in memory.final.values()
        }

    assert sources(4) == sources(8)


def test_many_sources() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(300)]
    listed = graph.call_function(aten._foreach_neg.default, (inputs,))
    items = [graph.call_function(operator.getitem, (listed, i)) for i in range(len(inputs))]
    graph.output((items, [], []))
    before, copies = copy_graph(graph)
    listed.args = ([inputs[-1], *inputs[1:-1], inputs[0]],)
    report = check_dependencies(before, graph, correspondence=copies)
    assert [problem.message for problem in report.problems] == [
        f"result {i} of the step does not depend on %x{i} any more" for i in (0, 299)
    ]


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


def compress(gm: fx.GraphModule) -> int:
    """Send gradients in bfloat16."""
    launches = [node for node in gm.graph.nodes if is_collective(node)]
    for launch in launches:
        (wait,) = launch.users
        with gm.graph.inserting_before(launch):
            sent = call_function_with_meta(
                gm.graph, aten._to_copy.default, launch.args[:1], {"dtype": torch.bfloat16}
            )
            new = call_function_with_meta(
                gm.graph, launch.target, (sent, *launch.args[1:]), like=launch
            )
        with gm.graph.inserting_before(wait):
            received = call_function_with_meta(gm.graph, wait.target, (new,), like=wait)
            back = call_function_with_meta(
                gm.graph, aten._to_copy.default, (received,), {"dtype": torch.float32}
            )
        wait.replace_all_uses_with(back)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(launch)
    return len(launches)


@pytest.mark.parametrize("declared", [True, False])
def test_compression_must_be_declared(
    declared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = PassRegistry()
    pass_ = graph_optimization_pass(changes_numerics=declared, registry=registry)(compress)
    gm, manager = training_step(2), PassManager([pass_], registry=registry)
    if declared:
        (record,) = manager.run(gm)
        assert record.changes_numerics
        assert record.changes
    else:
        with pytest.raises(VerificationError) as caught:
            manager.run(gm)
        text = str(caught.value)
        changed = r"the dtype of \d+ elements that are sent changed: all_reduce\(sum, group 0\) of"
        assert re.search(changed + " torch.bfloat16 now, before it was .* of torch.float32", text)
        assert "hint:      a pass declared with changes_numerics=True may send another" in text


def other_reduction(gm: fx.GraphModule) -> int:
    """Average where gradients are summed."""
    launches = find_nodes(gm.graph, is_collective)
    for launch in launches:
        launch.update_arg(1, "avg")
    return len(launches)


def other_group(gm: fx.GraphModule) -> int:
    """Communicate in another group."""
    find_nodes(gm.graph, is_collective)[0].update_arg(2, "1")
    return 1


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(other_reduction, "the reduction of "), (other_group, "there is no process group")],
)
def test_what_of_a_collective_changed_is_named(
    wrong: Callable[..., Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pass_ = graph_optimization_pass(changes_numerics=True, registry=PassRegistry())(wrong)
    with pytest.raises(VerificationError, match=what):
        PassManager([pass_]).run(training_step(2))
