"""Rewrites that keep all dependencies of a step are accepted; late nodes; large graphs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta, get_output, get_outputs, set_outputs
from graphopt.ir.accesses import MemoryOrder
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.verify import check_dependencies
from graphopt.verify.flow import Flow
from graphopt.verify.labels import Labels
from graphopt.verify.reach import CHUNK
from graphs import training_step
from rewrites import fuse, nodes_of, report_of, snapshot, split_list_operator, updates_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
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
def test_buckets_and_lists_are_linear(optimizer: str) -> None:
    """Twice the parameters in one bucket and one list: twice the edges, not four times."""

    def edges(layers: int) -> int:
        step = training_step(layers, optimizer=optimizer)
        fuse(step, 10**6)
        flow = Flow(step.graph, MemoryOrder(step.graph), Labels())
        return sum(map(len, flow.predecessors))

    assert edges(40) < 2.1 * edges(20)


def test_more_sources_than_are_followed_at_a_time() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(CHUNK + 10)]
    listed = graph.call_function(aten._foreach_neg.default, (inputs,))
    items = [graph.call_function(operator.getitem, (listed, i)) for i in range(len(inputs))]
    graph.output((items, [], []))
    before, copies = copy_graph(graph)
    listed.args = ([inputs[-1], *inputs[1:-1], inputs[0]],)
    report = check_dependencies(before, graph, correspondence=copies)
    assert [problem.message for problem in report.problems] == [
        f"result {i} of the step does not depend on %x{i} any more" for i in (0, CHUNK + 9)
    ]
