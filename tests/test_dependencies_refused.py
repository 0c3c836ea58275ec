"""Of a rewrite that loses a dependency it is said which."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import graphopt
from graphopt.graph_utils import call_function_with_meta, get_output, get_outputs, set_outputs
from graphopt.iter_graph import copy_graph
from graphopt.verify import check_dependencies
from graphs import training_step
from rewrites import fuse, nodes_of, reduced, report_of, updates_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


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
    first, second, *_ = updates_of(step)
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
    update = updates_of(step)[-1]
    with step.graph.inserting_after(update):
        call_function_with_meta(step.graph, aten.neg.default, (update.args[0],))


def read_a_view_after_update(step: fx.GraphModule) -> None:
    update = next(u for u in updates_of(step) if u.args[0].target == "p0_weight")
    view = next(user for user in update.args[0].users if user.target is aten.t.default)
    with step.graph.inserting_after(update):
        call_function_with_meta(step.graph, aten.neg.default, (view,))


def update_before_read(step: fx.GraphModule) -> None:
    update = next(u for u in updates_of(step) if u.args[0].target == "p0_weight")
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
        (return_less, "returned 1 result, now 0"),
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
