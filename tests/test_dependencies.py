"""Rewrites that keep all dependencies are accepted; of those that lose one, it is said which."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.graph_utils import (
    call_function_with_meta,
    get_output,
    get_outputs,
    set_outputs,
)
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.verify import check_dependencies
from graphopt.verify.flow import Flow
from graphopt.verify.labels import Labels
from graphopt.verify.memory import Memory
from graphopt.verify.reach import CHUNK
from graphs import training_step
from rewrites import fuse, nodes_of, reduced, snapshot, split_list_operator

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
OPTIMIZERS = ("fused", "foreach", "loop")


def report_of(graph_module: fx.GraphModule, rewrite: Callable[[fx.GraphModule], None]) -> Any:
    """What is said of a rewrite, which is the same with nodes matched by name."""
    before, copies = snapshot(graph_module)
    rewrite(graph_module)
    report = check_dependencies(before, graph_module, correspondence=copies)
    assert check_dependencies(before, graph_module).ok == report.ok
    return report


def copies_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    return get_outputs(graph_module.graph).updates


# ---------------------------------------------------------------------------- accepted


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
        orphan = next(n for n in nodes_of(step, aten.copy_.default) if n not in copies_of(step))
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


# ---------------------------------------------------------------------------- refused


def drop_wait(step: fx.GraphModule) -> None:
    wait = reduced(step)[0]
    wait.replace_all_uses_with(wait.args[0])
    step.graph.erase_node(wait)


def read_before_wait(step: fx.GraphModule) -> None:
    wait = reduced(step)[0]
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, wait.args[0])


def wait_twice(step: fx.GraphModule) -> None:
    wait = reduced(step)[0]
    with step.graph.inserting_after(wait):
        call_function_with_meta(step.graph, wait.target, wait.args, like=wait)


def drop_collective(step: fx.GraphModule) -> None:
    wait = reduced(step)[0]
    wait.replace_all_uses_with(wait.args[0].args[0])
    launch = wait.args[0]
    step.graph.erase_node(wait)
    step.graph.erase_node(launch)


def bypass_collective(step: fx.GraphModule) -> None:
    wait = reduced(step)[0]
    wait.replace_all_uses_with(wait.args[0].args[0])


def reduce_otherwise(step: fx.GraphModule) -> None:
    launch = nodes_of(step, c10d.all_reduce.default)[0]
    launch.args = (launch.args[0], "max", launch.args[2])


def exchange_gradients(step: fx.GraphModule) -> None:
    first, _, second, *_ = reduced(step)
    first.args, second.args = second.args, first.args


def split_a_bucket_wrongly(step: fx.GraphModule) -> None:
    fuse(step, 4)
    split = nodes_of(step, aten.split_with_sizes.default)[0]
    first, second, *_ = sorted(split.users, key=lambda item: item.args[1])
    first.args, second.args = second.args, first.args


def exchange_list_elements(step: fx.GraphModule) -> None:
    node = nodes_of(step, aten._fused_adamw.tensor_lr)[0]
    gradients = list(node.args[1])
    gradients[0], gradients[2] = gradients[2], gradients[0]
    node.args = (node.args[0], gradients, *node.args[2:])


def pick_another_item(step: fx.GraphModule) -> None:
    node = nodes_of(step, aten._foreach_add.Scalar)[0]
    item = next(iter(node.users))
    item.args = (node, 3)


def drop_update(step: fx.GraphModule) -> None:
    outputs = get_outputs(step.graph)
    set_outputs(step.graph, outputs._replace(updates=outputs.updates[1:]))
    step.graph.erase_node(outputs.updates[0])


def forget_update(step: fx.GraphModule) -> None:
    outputs = get_outputs(step.graph)
    set_outputs(step.graph, outputs._replace(updates=outputs.updates[1:]))


def update_with_another(step: fx.GraphModule) -> None:
    first, second, *_ = copies_of(step)
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])


def update_what_was_not(step: fx.GraphModule) -> None:
    x = next(n for n in step.graph.nodes if n.op == "placeholder" and n.target == "x")
    with step.graph.inserting_before(get_output(step.graph)):
        call_function_with_meta(step.graph, aten.copy_.default, (x, x))


def return_another(step: fx.GraphModule) -> None:
    outputs = get_outputs(step.graph)
    other = nodes_of(step, aten.gelu.default)[0]
    set_outputs(step.graph, outputs._replace(results=[other]))


def return_a_constant(step: fx.GraphModule) -> None:
    set_outputs(step.graph, get_outputs(step.graph)._replace(results=[None]))


def return_less(step: fx.GraphModule) -> None:
    set_outputs(step.graph, get_outputs(step.graph)._replace(results=[]))


def draw_less(step: fx.GraphModule) -> None:
    drawn = nodes_of(step, aten.native_dropout.default)
    drawn[-1].replace_all_uses_with(drawn[0])
    step.graph.erase_node(drawn[-1])


def draw_more(step: fx.GraphModule) -> None:
    drawn = nodes_of(step, aten.native_dropout.default)[0]
    with step.graph.inserting_before(drawn):
        call_function_with_meta(step.graph, drawn.target, drawn.args)


def read_after_update(step: fx.GraphModule) -> None:
    update = copies_of(step)[-1]
    with step.graph.inserting_after(update):
        call_function_with_meta(step.graph, aten.neg.default, (update.args[0],))


def read_a_view_after_update(step: fx.GraphModule) -> None:
    update = next(u for u in copies_of(step) if u.args[0].target == "p0_weight")
    view = next(user for user in update.args[0].users if user.target is aten.t.default)
    with step.graph.inserting_after(update):
        call_function_with_meta(step.graph, aten.neg.default, (view,))


def update_before_read(step: fx.GraphModule) -> None:
    update = next(u for u in copies_of(step) if u.args[0].target == "p0_weight")
    nodes_of(step, aten.t.default)[0].prepend(update)
    update.args = (update.args[0], update.args[0])


def overwrite_what_is_sent(step: fx.GraphModule) -> None:
    launch = nodes_of(step, c10d.all_reduce.default)[0]
    with step.graph.inserting_after(launch):
        call_function_with_meta(step.graph, aten.zero_.default, (launch.args[0],))


def read_too_early(step: fx.GraphModule) -> None:
    gelu = nodes_of(step, aten.gelu.default)[0]
    gelu.args[0].prepend(gelu)


def exchange_placeholders(step: fx.GraphModule) -> None:
    first, second, *_ = (n for n in step.graph.nodes if n.op == "placeholder")
    second.append(first)


@pytest.mark.parametrize(
    ("rewrite", "said"),
    [
        (drop_wait, "has 0 waits"),
        (read_before_wait, "before its wait"),
        (wait_twice, "has 2 waits"),
        (drop_collective, "elements of torch.float32, before it was"),
        (bypass_collective, "through all_reduce(sum, group 0) any more"),
        (reduce_otherwise, "through all_reduce(sum, group 0) any more"),
        (exchange_gradients, "through all_reduce(sum, group 0) any more"),
        (split_a_bucket_wrongly, "through all_reduce(sum, group 0) any more"),
        (exchange_list_elements, "through all_reduce(sum, group 0) any more"),
        (pick_another_item, "does not depend on %o"),
        (drop_update, "is not updated any more"),
        (forget_update, "not among the state updates"),
        (update_with_another, "does not depend on %o"),
        (update_what_was_not, "%x is updated, which it was not before"),
        (return_another, "result 0 of the step does not depend on %sum_default any more"),
        (return_a_constant, "result 0 of the step is a constant"),
        (return_less, "returned 1 results"),
        (draw_less, "are not drawn any more"),
        (draw_more, "draws random numbers"),
        (read_after_update, "has overwritten it"),
        (read_a_view_after_update, "has overwritten it"),
        (update_before_read, "has overwritten it"),
        (overwrite_what_is_sent, "still sends"),
        (read_too_early, "before the value exists"),
        (exchange_placeholders, "the placeholders are not those"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(rewrite: Callable[[fx.GraphModule], None], said: str) -> None:
    report = report_of(training_step(3, dropout=True), rewrite)
    assert not report.ok
    assert said in str(report)
    assert all(isinstance(node, fx.Node) for problem in report.problems for node in problem.nodes)
    with pytest.raises(graphopt.VerificationError):
        report.raise_for_failure()


def test_random_numbers_keep_their_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(aten.bernoulli.p, (x, p)) for p in (0.1, 0.2))
    graph.output(([first, second], [], []))
    before, copies = copy_graph(graph)
    second.append(first)
    report = check_dependencies(before, graph, correspondence=copies)
    assert [str(problem).splitlines()[0] for problem in report.problems] == [
        "%bernoulli_p_1 draws random numbers where %bernoulli_p drew them before"
    ]


def test_a_problem_is_readable() -> None:
    step = training_step(1, optimizer="loop")
    reader = next(iter(reduced(step)[0].users))
    reader.meta["source"] = "train.py:41  optimizer.step()"
    report = report_of(step, bypass_collective)
    assert str(report.problems[0]) == (
        "%add_tensor_2 does not get %mul_tensor through all_reduce(sum, group 0) any more\n"
        "  > %add_tensor_2 = aten.add.Tensor(%mul_tensor_3, %mul_tensor)\n"
        "    %mul_tensor = aten.mul.Tensor(%view_default, 0.5)\n"
        "  from:      train.py:41  optimizer.step()"
    )


# ---------------------------------------------------------------------------- late nodes


def test_late_nodes() -> None:
    step = IterGraphModule(training_step(2, optimizer="loop", ranks=None))
    graph = step.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    update = next(u for u in copies_of(step) if u.args[0].target == "p0_weight")
    new = update.args[1]

    def move(step: fx.GraphModule) -> None:
        graph.move_to_next_iter_before([new, update], first)

    assert report_of(step, move).ok
    with graph.inserting_after(new):
        reader = call_function_with_meta(graph, aten.neg.default, (new,))
    assert "runs one iteration later" in str(check_dependencies(graph, graph))
    graph.erase_node(reader)
    assert check_dependencies(graph, graph).ok


# ---------------------------------------------------------------------------- updates in place


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


# ---------------------------------------------------------------------------- size


@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_buckets_and_lists_are_linear(optimizer: str) -> None:
    """Twice the parameters in one bucket and one list: twice the edges, not four times."""

    def edges(layers: int) -> int:
        step = training_step(layers, optimizer=optimizer)
        fuse(step, 10**6)
        flow = Flow(step.graph, Memory(step.graph), Labels())
        return sum(map(len, flow.predecessors))

    assert edges(40) < 2.1 * edges(20)


@pytest.mark.slow
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
