"""Parts of one iteration that run in the next: what is derived, and that state ends up the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from graphopt._compat import make_fx
from graphopt.errors import GraphOptError, IterationError
from graphopt.executable import finalize
from graphopt.graph_utils import find_all_descendants, get_output
from graphopt.iter_graph import IterGraph, IterGraphModule, check_late, copy_graph
from slices import examples

aten = torch.ops.aten


def handmade() -> fx.GraphModule:
    """``y = x * w``; then ``s += y.sum()`` and ``w += y.sum() * lr``, as captured graphs do it."""
    w, s, x, lr = torch.ones(3), torch.zeros(()), torch.ones(3), torch.ones((), dtype=torch.float64)

    def program(w: Tensor, s: Tensor, x: Tensor, lr: Tensor) -> Any:
        y = aten.mul.Tensor(x, w)
        total = aten.sum.default(y)
        new_s = aten.add.Tensor(s, total)
        scaled = aten.mul.Tensor(total, lr)
        new_w = aten.add.Tensor(w, scaled)
        return [y], [aten.copy_.default(s, new_s), aten.copy_.default(w, new_w)], []

    module = make_fx(program)(w, s, x, lr)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["kind"] = {
                "w_1": "parameter",
                "s_1": "optimizer_state",
                "x_1": "user_input",
                "lr_1": "hyperparameter",
            }[node.name]
    return module


def named(graph: fx.Graph, name: str) -> fx.Node:
    (node,) = (node for node in graph.nodes if node.name == name)
    return node


@pytest.fixture
def update() -> IterGraphModule:
    """`handmade`, of which everything after the sum runs late."""
    module = IterGraphModule(handmade())
    graph = module.graph
    late = [named(graph, "add"), named(graph, "mul_1"), named(graph, "add_1")]
    late += find_all_descendants(late) - set(late)
    graph.move_to_next_iter_before(late, named(graph, "mul"))
    return module


def initial() -> dict[str, Tensor]:
    return {"w": torch.arange(3.0), "s": torch.zeros(())}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and learning rates that differ from step to step."""
    return [
        (torch.randn(3), torch.tensor(0.1 * (k + 1), dtype=torch.float64)) for k in range(count)
    ]


def run(
    module: Callable[..., Any], state: dict[str, Tensor], inputs: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    return [module(state["w"], state["s"], x, lr)[0][0].clone() for x, lr in inputs]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("transform", [None, finalize], ids=["captured", "executable"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_late_updates_end_where_the_step_ends(
    update: IterGraphModule, steps: int, transform: Any
) -> None:
    update.finalize_setup(transform)
    inputs, expected, actual = batches(steps), initial(), initial()
    wanted = run(handmade(), expected, inputs)
    got = run(update, actual, inputs)
    assert all(map(torch.equal, got, wanted))
    assert not same(actual, expected), "the last update ran at once"
    update.flush()
    assert same(actual, expected)


@settings(max_examples=examples(20))
@given(flushes=st.lists(st.booleans(), min_size=1, max_size=7))
def test_flushing_anywhere_changes_nothing(flushes: list[bool]) -> None:
    module = IterGraphModule(handmade())
    graph = module.graph
    late = [named(graph, "mul_1"), *find_all_descendants([named(graph, "mul_1")])]
    graph.move_to_next_iter_before(late, named(graph, "mul"))
    expected, actual = initial(), initial()
    for (x, lr), flush in zip(batches(len(flushes)), flushes, strict=True):
        (wanted,) = run(handmade(), expected, [(x, lr)])
        (got,) = run(module, actual, [(x, lr)])
        assert torch.equal(got, wanted)
        if flush:
            module.flush()
            assert same(actual, expected)
    module.flush()
    assert same(actual, expected)


def test_the_last_iteration_leaves_nothing_in_flight(update: IterGraphModule) -> None:
    expected, actual = initial(), initial()
    for x, lr in batches(3):
        run(handmade(), expected, [(x, lr)])
        update(actual["w"], actual["s"], x, lr, last_iter=True)
        assert same(actual, expected)
        assert not update.in_flight


def test_cleanup_is_main_followed_by_drain(update: IterGraphModule) -> None:
    (first, second), actual, expected = batches(2), initial(), initial()
    run(handmade(), expected, [first, second])
    _, _, carried = update.setup_gm(actual["w"], actual["s"], *first)
    update.cleanup_gm(actual["w"], actual["s"], *second, *carried)
    assert same(actual, expected)


def test_values_that_change_between_iterations_are_carried(update: IterGraphModule) -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    x, expected, actual = torch.ones(3), initial(), initial()
    handmade()(expected["w"], expected["s"], x.clone(), rate.clone())
    update(actual["w"], actual["s"], x, rate)
    x.zero_()
    rate.fill_(100.0)
    update.flush()
    assert same(actual, expected)


def test_a_late_update_is_returned_as_the_state() -> None:
    def program(w: Tensor, x: Tensor) -> Any:
        new = aten.add.Tensor(w, aten.sum.default(x))
        return aten.sum.default(x), aten.copy_.default(w, new)

    module = IterGraphModule(make_fx(program)(torch.ones(()), torch.ones(2)))
    graph = module.graph
    moved = [named(graph, "add"), named(graph, "copy_")]
    graph.move_to_next_iter_before(moved, get_output(graph))
    state = torch.zeros(())
    for k in range(1, 4):
        total, returned = module(state, torch.ones(2))
        assert returned is state
        assert (float(total), float(state)) == (2.0, 2.0 * (k - 1))
    module.flush()
    assert float(state) == 6.0


def test_one_graph_is_edited_and_four_follow(update: IterGraphModule) -> None:
    def calls(module: fx.GraphModule) -> list[str]:
        return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]

    late = ["aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]
    late += ["aten.copy_.default", "aten.copy_.default"]
    assert sorted(calls(update.drain_gm)) == sorted(late)
    rest = ["aten.mul.Tensor", "aten.sum.default"]
    assert [c for c in calls(update.setup_gm) if "clone" not in c] == rest
    assert calls(update.main_gm)[:5] != rest and calls(update.main_gm)[-2:] == rest
    with update.graph.inserting_after(named(update.graph, "mul")):
        update.graph.call_function(aten.neg.default, (named(update.graph, "mul"),))
    update.recompile()
    assert "aten.neg.default" in calls(update.main_gm)
    assert "aten.neg.default" in calls(update.cleanup_gm)
    assert "aten.neg.default" not in calls(update.drain_gm)


def refused() -> Iterator[Any]:
    yield pytest.param(["sum_1"], "mul", "needs %sum_1 in this iteration", id="users stay")
    yield pytest.param(["mul"], "sum_1", "the step returns it", id="feeds the output")
    yield pytest.param(["add_1", "copy__1"], "sum_1", "reads %w_1 before", id="read before")
    yield pytest.param(["add_1", "copy__1"], "copy__1", "is itself moved", id="before itself")
    yield pytest.param(["x_1"], "mul", "only calls can be moved", id="placeholder")
    yield pytest.param(["add_1"], "x_1", "name the node that reads it", id="to a placeholder")
    yield pytest.param([], "mul", "no nodes", id="nothing")


@pytest.mark.parametrize(("names", "target", "message"), list(refused()))
def test_refused_moves_change_nothing(names: list[str], target: str, message: str) -> None:
    module = IterGraphModule(handmade())
    graph = module.graph
    with pytest.raises(IterationError, match=message):
        graph.move_to_next_iter_before([named(graph, n) for n in names], named(graph, target))
    assert not graph.late


def test_why_nodes_cannot_be_late_is_said_before() -> None:
    graph = IterGraphModule(handmade()).graph
    update = [named(graph, "add"), named(graph, "copy_")]
    reason = graph.can_move_late(update[:1])
    assert reason is not None and "%copy_" in reason and not graph.late
    assert graph.can_move_late([]) == "no nodes to move were given"
    reason = graph.can_move_late([named(graph, "w_1")])
    assert reason is not None and "only calls can be moved" in reason
    module = handmade()
    named(module.graph, "s_1").meta["kind"] = "gradient"
    reason = IterGraphModule(module).graph.can_move_late([named(graph, "add")])
    assert reason is not None and "is not a node of this graph" in reason


def test_without_a_destination_nodes_run_before_the_first_read() -> None:
    graph = two_updates_plain().graph
    late = [named(graph, name) for name in ("add", "copy_", "add_1", "copy__1")]
    assert graph.can_move_late(late[:2]) is None
    assert graph.can_move_late(late[2:]) is None
    graph.move_to_next_iter_before(late[:2])
    graph.move_to_next_iter_before(late[2:])
    assert {n.name: d.name for n, d in graph.late.items()} == {
        "add": "neg",
        "copy_": "neg",
        "add_1": "output",
        "copy__1": "output",
    }


def test_random_numbers_keep_their_iteration() -> None:
    def program(w: Tensor) -> Any:
        drawn = aten.bernoulli.default(w)
        return [], [aten.copy_.default(w, drawn)], []

    graph = IterGraphModule(make_fx(program)(torch.rand(3))).graph
    with pytest.raises(IterationError, match="random"):
        graph.move_to_next_iter_before(
            [named(graph, "bernoulli"), named(graph, "copy_")], get_output(graph)
        )


def test_gradients_are_not_updated_late() -> None:
    module = handmade()
    named(module.graph, "s_1").meta["kind"] = "gradient"
    graph = IterGraphModule(module).graph
    with pytest.raises(IterationError, match="may be read between two steps"):
        graph.move_to_next_iter_before(
            [named(graph, "add"), named(graph, "copy_")], get_output(graph)
        )


def test_a_pass_that_uses_a_late_value_is_noticed(update: IterGraphModule) -> None:
    graph = update.graph
    with graph.inserting_before(get_output(graph)):
        graph.call_function(aten.neg.default, (named(graph, "add"),))
    (problem,) = check_late(update)
    assert "%neg" in problem and "%add" in problem
    assert check_late(handmade()) == []


def test_marks_follow_copies_and_erased_nodes(update: IterGraphModule) -> None:
    copied, copies = copy_graph(update.graph)
    assert isinstance(copied, IterGraph)
    assert [n.name for n in copied.nodes] == [n.name for n in update.graph.nodes]
    assert {n.name for n in copied.late} == {n.name for n in update.graph.late}
    assert all(copied.late[copies[n]] is copies[d] for n, d in update.graph.late.items())
    twin = copy.deepcopy(update)
    assert {n.name for n in twin.graph.late} == {n.name for n in update.graph.late}

    graph = update.graph
    with graph.inserting_before(named(graph, "mul")):
        marker = graph.call_function(aten.neg.default, (named(graph, "x_1"),))
    graph.move_to_next_iter_before(graph.late, marker)
    graph.erase_node(marker)
    assert set(graph.late.values()) == {named(graph, "mul")}


def test_a_failure_before_late_work_loses_nothing(update: IterGraphModule) -> None:
    inputs, expected, actual = batches(3), initial(), initial()
    run(handmade(), expected, [inputs[0], inputs[2]])
    run(update, actual, [inputs[0]])
    with pytest.raises(RuntimeError, match="size of tensor"):
        update(actual["w"], actual["s"], torch.ones(7), inputs[1][1])
    run(update, actual, [inputs[2]])
    update.flush()
    assert same(actual, expected)


def two_updates_plain() -> IterGraphModule:
    """``w += x`` and ``v += y``; `w` is read at the beginning."""

    def program(w: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Any:
        result = aten.neg.default(w)
        first = aten.copy_.default(w, aten.add.Tensor(w, x))
        return [result], [first, aten.copy_.default(v, aten.add.Tensor(v, y))], []

    return IterGraphModule(make_fx(program)(*(torch.ones(3) for _ in range(4))))


def two_updates() -> IterGraphModule:
    """The same, both late."""
    module = two_updates_plain()
    graph = module.graph
    late = [named(graph, name) for name in ("add", "copy_", "add_1", "copy__1")]
    graph.move_to_next_iter_before(late, named(graph, "neg"))
    return module


def test_half_an_update_is_not_hidden() -> None:
    module, ones = two_updates(), torch.ones(3)
    w, v = torch.ones(3), torch.ones(3)
    module(w, v, ones, torch.ones(4))
    with pytest.raises(RuntimeError, match="size of tensor"):
        module(w, v, ones, ones)
    assert not module.resumable
    for attempt in (module.flush, lambda: module(w, v, ones, ones)):
        with pytest.raises(GraphOptError, match="load a checkpoint"):
            attempt()
    module.drop_flight()
    v.fill_(2.0)
    module(w, v, ones, ones, last_iter=True)
    assert w.tolist() == v.tolist() == [3.0, 3.0, 3.0]


def test_an_update_that_fails_before_it_writes_is_lost_as_a_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, ones = two_updates(), torch.ones(3)
    w, v = torch.ones(3), torch.ones(3)
    module(w, v, torch.ones(4), ones)
    with pytest.raises(RuntimeError, match="size of tensor"):
        module.flush()
    assert "the last update of a training step is lost" in caplog.text
    assert w.tolist() == v.tolist() == [1.0, 1.0, 1.0]
    module(w, v, ones, ones, last_iter=True)
    assert w.tolist() == v.tolist() == [2.0, 2.0, 2.0]


def test_a_graph_in_flight_is_not_rewritten(update: IterGraphModule) -> None:
    run(update, initial(), batches(1))
    with pytest.raises(GraphOptError, match="flush"):
        update.recompile()
    update.flush()
    update.recompile()
