"""`check_pass` finds what is wrong with a pass, and lets a right one through."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt.errors import PassError, VerificationError
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_output,
    get_outputs,
    is_operator,
    set_outputs,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassRegistry, default_registry, graph_optimization_pass
from graphopt.testing import UPDATE, check_pass

aten = torch.ops.aten


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = torch.tanh(model(x)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.fixture
def args() -> tuple[Any, ...]:
    model = nn.Linear(3, 2, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 3)


def declared(function: Callable[..., Any], **constraints: Any) -> Pass:
    return graph_optimization_pass(registry=PassRegistry(), **constraints)(function)


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, f"aten::{name}"))


def cancel_transposes(gm: fx.GraphModule, most: int = 100) -> int:
    """Let readers of t(t(x)) read x."""
    pairs = 0
    for node in calls(gm, "t")[:most]:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        if is_operator(inner.target, "aten::t"):
            node.replace_all_uses_with(inner.args[0])
            pairs += 1
    return pairs


GOLDEN = """
    ── inputs: parameter ──
    %weight  f32[2, 3]
    ── inputs: hyperparameter ──
    %optimizer_param_groups_0_lr  f64[]
    %optimizer_param_groups_0_momentum  f64[]
    %optimizer_param_groups_0_weight_decay  f64[]
    ── inputs: user_input ──
    %x  f32[4, 3]
    ── optimizer ──
    %_local_scalar_dense = aten._local_scalar_dense.default(%optimizer_param_groups_0_lr)  float
    ── forward ──
    %t = aten.t.default(%weight)  f32[3, 2]
    %mm = aten.mm.default(%x, %t)  f32[4, 2]
    %tanh = aten.tanh.default(%mm)  f32[4, 2]
    %sum_1 = aten.sum.default(%tanh)  f32[]
    ── backward ──
    %ones_like = aten.ones_like.default(%sum_1, pin_memory=False, memory_format=preserve_format)  f32[]
    %expand = aten.expand.default(%ones_like, [4, 2])  f32[4, 2]
    %tanh_backward = aten.tanh_backward.default(%expand, %tanh)  f32[4, 2]
    %t_1 = aten.t.default(%tanh_backward)  f32[2, 4]
    %mm_1 = aten.mm.default(%t_1, %x)  f32[2, 3]
    ── optimizer ──
    %neg = operator.neg(%_local_scalar_dense)  float
    %add = aten.add.Tensor(%weight, %mm_1, alpha=%neg)  f32[2, 3]
    ● %copy__default = aten.copy_.default(%weight, %add)  f32[2, 3]
    ── output ──
    results: [%sum_1]
    updates: [%copy__default]
    carried: []
"""  # noqa: E501


def test_a_right_pass(args: tuple[Any, ...]) -> None:
    model, _, _ = args
    weight, generator = model.weight.detach().clone(), torch.get_rng_state()
    record = check_pass(step, args, declared(cancel_transposes), expect=GOLDEN, changes=1)
    assert record.changes == 1
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.get_rng_state(), generator)


def test_keyword_arguments_of_the_step(args: tuple[Any, ...]) -> None:
    model, optimizer, x = args
    check_pass(step, (model,), declared(cancel_transposes), kwargs={"optimizer": optimizer, "x": x})


def test_options_of_the_pass(args: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="reports 0 changes, not 1"):
        check_pass(step, args, declared(cancel_transposes), changes=1, most=0)


def test_a_pass_of_that_name(args: tuple[Any, ...]) -> None:
    assert check_pass(step, args, "remove_copy_from_optimizer", changes=0).changes == 0


def test_prerequisites_run_first(args: tuple[Any, ...]) -> None:
    late = default_registry().get("iter_move_grads_and_optimizers")
    assert "remove_copy_from_optimizer" in late.prerequisites
    check_pass(step, args, late, changes=0)


def test_random_numbers_are_the_same_in_both_runs(args: tuple[Any, ...]) -> None:
    model, optimizer, x = args
    with_dropout = nn.Sequential(model, nn.Dropout(0.5))
    check_pass(step, (with_dropout, optimizer, x), declared(cancel_transposes), changes=1)


def test_another_graph_than_expected(args: tuple[Any, ...]) -> None:
    expected = GOLDEN.replace("%mm = ", "%product = ")
    with pytest.raises(AssertionError) as caught:
        check_pass(step, args, declared(cancel_transposes), expect=expected)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the graph after cancel_transposes is not as expected"
    assert "-%product = aten.mm.default(%x, %t)  f32[4, 2]" in lines
    assert "+%mm = aten.mm.default(%x, %t)  f32[4, 2]" in lines


def test_golden_files(
    args: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, chosen = tmp_path / "golden" / "step.txt", declared(cancel_transposes)
    with pytest.raises(AssertionError, match=f"{UPDATE}=1 writes it"):
        check_pass(step, args, chosen, expect=golden)
    with monkeypatch.context() as environment:
        environment.setenv(UPDATE, "1")
        check_pass(step, args, chosen, expect=golden)
    check_pass(step, args, chosen, expect=golden)
    golden.write_text(golden.read_text().replace("%mm = ", "%product = "))
    with pytest.raises(AssertionError, match=f"{UPDATE}=1 writes the file anew"):
        check_pass(step, args, chosen, expect=golden)


def scale_result(gm: fx.GraphModule, factor: float) -> None:
    """Multiply the loss once."""
    if calls(gm, "mul"):
        return
    (loss,) = calls(gm, "sum")
    with gm.graph.inserting_after(loss):
        scaled = call_function_with_meta(gm.graph, aten.mul.Tensor, (loss, factor), like=loss)
    loss.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


@pytest.fixture
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers decide here, before any proof could."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")


@pytest.mark.usefixtures("_unverified")
def test_other_bits(args: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="scale_result changes result 0 of iteration 0"):
        check_pass(step, args, declared(scale_result), factor=1.0001)


@pytest.mark.usefixtures("_unverified")
def test_other_updates(args: tuple[Any, ...]) -> None:
    def update_twice_as_far(gm: fx.GraphModule) -> None:
        (update,) = calls(gm, "add")
        update.update_kwarg("alpha", -0.2)

    with pytest.raises(AssertionError, match=r"changes the final value of weight: 6 of 6 elements"):
        check_pass(step, args, declared(update_twice_as_far))


@pytest.mark.usefixtures("_unverified")
def test_numerics_within_a_tolerance(args: tuple[Any, ...]) -> None:
    chosen = declared(scale_result, changes_numerics=True)
    assert check_pass(step, args, chosen, factor=1.0001).changes_numerics
    with pytest.raises(AssertionError, match="scale_result changes result 0"):
        check_pass(step, args, chosen, factor=1.1)


@pytest.mark.usefixtures("_unverified")
def test_other_results(args: tuple[Any, ...]) -> None:
    def return_twice(gm: fx.GraphModule) -> None:
        outputs = get_outputs(gm.graph)
        set_outputs(gm.graph, outputs._replace(results=outputs.results * 2))

    with pytest.raises(AssertionError, match="return_twice changes what the graph returns"):
        check_pass(step, args, declared(return_twice))


def test_a_second_run_that_changes_the_graph(args: tuple[Any, ...]) -> None:
    def copy_loss(gm: fx.GraphModule) -> int:
        (loss,) = (node for node in get_outputs(gm.graph).results if isinstance(node, fx.Node))
        with gm.graph.inserting_before(get_output(gm.graph)):
            copied = call_function_with_meta(gm.graph, aten.clone.default, (loss,), like=loss)
        get_output(gm.graph).replace_input_with(loss, copied)
        return 1

    with pytest.raises(AssertionError, match="a second run of copy_loss changes the graph again"):
        check_pass(step, args, declared(copy_loss))


def test_a_second_run_that_reports_changes(args: tuple[Any, ...]) -> None:
    def boast(gm: fx.GraphModule) -> int:
        return 3

    with pytest.raises(AssertionError, match="reports 3 changes, but the graph is the same"):
        check_pass(step, args, declared(boast))


def test_a_pass_that_raises(
    args: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def stumble(gm: fx.GraphModule) -> None:
        raise ZeroDivisionError("stumbled")

    with pytest.raises(PassError, match="stumbled"):
        check_pass(step, args, declared(stumble))


def test_a_pass_that_is_refused(
    args: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def hoist(gm: fx.GraphModule) -> None:
        calls(gm, "t")[0].prepend(calls(gm, "tanh")[0])

    with pytest.raises(VerificationError, match="before the value exists"):
        check_pass(step, args, declared(hoist))


def update_late(gm: IterGraphModule) -> int:
    """Move the update to the next iteration."""
    if gm.graph.late:
        return 0
    (update,) = calls(gm, "add")
    (copied,) = calls(gm, "copy_")
    gm.graph.move_to_next_iter_before([update, copied], calls(gm, "t")[0])
    return 1


def test_late_work_is_compared_over_iterations(args: tuple[Any, ...]) -> None:
    check_pass(step, args, declared(update_late), changes=1)


@pytest.mark.usefixtures("_unverified")
def test_late_work_with_the_learning_rate_of_another_iteration(args: tuple[Any, ...]) -> None:
    """The first iteration is right: only later ones show it."""

    def forget_schedule(gm: IterGraphModule) -> None:
        if update_late(gm):
            calls(gm, "add")[0].update_kwarg("alpha", -0.1)

    with pytest.raises(AssertionError, match="result 0 of iteration 2"):
        check_pass(step, args, declared(forget_schedule))


def test_a_graph_module(args: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["val"] = torch.zeros(2, 2)
    twice = call_function_with_meta(graph, aten.t.default, (x,))
    twice = call_function_with_meta(graph, aten.t.default, (twice,))
    graph.output((call_function_with_meta(graph, aten.add_.Tensor, (y, twice)), 3))
    gm = fx.GraphModule(nn.Module(), graph)
    inputs = (torch.randn(2, 2), torch.randn(2, 2))
    kept = inputs[1].clone()
    check_pass(gm, inputs, declared(cancel_transposes), changes=1)
    assert torch.equal(inputs[1], kept)
    assert len(calls(gm, "t")) == 2
    with pytest.raises(TypeError, match="takes its inputs in `args` alone"):
        check_pass(gm, inputs, declared(cancel_transposes), kwargs={"x": inputs[0]})


def test_results_that_are_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(operator.add, (x, 1))
    graph.output([total])

    def subtract(gm: fx.GraphModule) -> None:
        for node in find_nodes(gm.graph, lambda node: node.target is operator.add):
            node.target = operator.sub

    with pytest.raises(AssertionError, match="result 0 of iteration 0: 1 instead of 3"):
        check_pass(
            fx.GraphModule(nn.Module(), graph), (2,), declared(subtract, changes_numerics=True)
        )
