"""A refusal says whether random inputs tell what the pass left from what it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import graphopt
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator
from graphopt.testing import fake_ranks
from graphopt.verify.trials.forked_process import EndedError, run_in_fork
from graphopt.verify.trials.numeric_trial import verdict

aten = torch.ops.aten
seen: list[Any] = []


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    graphopt.callback(seen.append, loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss * 0.375


@pytest.fixture(params=[1, 2, 3])
def captured(request: pytest.FixtureRequest) -> Iterator[fx.GraphModule]:
    """A step with buffers, dropout and a callback, on so many ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = model, optimizer, torch.randn(4, 8), torch.randint(0, 4, (4,))
    with fake_ranks(request.param) if request.param > 1 else nullcontext():
        step(*args)
        yield graphopt.capture(step, *args).graph_module


def refusal(gm: fx.GraphModule, function: Callable[[fx.GraphModule], None]) -> str:
    """What the error of a pass says."""
    edit = graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())(function)
    with pytest.raises(graphopt.VerificationError) as caught:
        graphopt.PassManager([edit]).run(gm)
    return str(caught.value)


def negate_gradient(gm: fx.GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if is_operator(n.target, "aten::gelu_backward"))
    with gm.graph.inserting_after(node):
        negated = call_function_with_meta(gm.graph, aten.neg.default, (node,))
    node.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)


def scale_result(gm: fx.GraphModule) -> None:
    for node in find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::mul")):
        if node.args[1] == 0.375:
            node.update_arg(1, 0.25)


def double_and_halve(gm: fx.GraphModule) -> None:
    """Exact, though no rule says so."""
    node = next(n for n in gm.graph.nodes if is_operator(n.target, "aten::gelu"))
    with gm.graph.inserting_before(node):
        twice = call_function_with_meta(gm.graph, aten.mul.Tensor, (node.args[0], 2.0))
        again = call_function_with_meta(gm.graph, aten.div.Tensor, (twice, 2.0))
    node.update_arg(0, again)


@pytest.mark.parametrize("edit", [negate_gradient, scale_result])
def test_a_wrong_edit_is_said_to_give_other_numbers(
    captured: fx.GraphModule, edit: Callable[[fx.GraphModule], None]
) -> None:
    found = re.search(
        r"trial: +different on random inputs: max \|Δ\| = (\S+) in `(.+)`", refusal(captured, edit)
    )
    assert found is not None
    assert float(found[1]) > 0
    results = edit is scale_result
    assert found[2].startswith("result") == results


def test_a_right_edit_without_a_rule_is_said_to_give_the_same(captured: fx.GraphModule) -> None:
    assert "no difference in 8 trials on random inputs; a rule may be missing" in refusal(
        captured, double_and_halve
    )


def test_a_trial_leaves_nothing_behind(captured: fx.GraphModule) -> None:
    seen.clear()
    before = torch.get_rng_state()
    refusal(captured, double_and_halve)
    assert not seen, "callbacks are the user's, and are not called"
    assert torch.equal(torch.get_rng_state(), before)


def test_late_work_is_run_in_its_iteration() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any, x: Any) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with fake_ranks(2):
        gm = graphopt.capture(train, model, optimizer, torch.randn(3, 4)).graph_module
        late = graphopt.IterGraphModule(gm)
        graphopt.PassManager(
            "remove_copy_from_optimizer -> comm_fusion_with_concat -> schedule_comm_wait"
            " -> iter_move_grads_and_optimizers"
        ).run(late)
        assert late.graph.late
        assert (
            verdict(gm, late) == "no difference in 8 trials on random inputs; a rule may be missing"
        )
        wrong = graphopt.IterGraphModule(late)
        for node in find_nodes(wrong.graph, lambda n: is_operator(n.target, "aten::div")):
            node.update_arg(1, 3)
        wrong.recompile()
        assert "different on random inputs" in str(verdict(gm, wrong))


def test_what_cannot_be_run_here_gets_no_verdict() -> None:
    graph = fx.Graph()
    there = graph.placeholder("x")
    there.meta["val"] = torch.empty(2, device="meta")
    graph.output(there)
    gm = fx.GraphModule({}, graph)
    assert verdict(gm, gm) is None


def test_numbers_that_are_not_finite_decide_nothing() -> None:
    graph = fx.Graph()
    there = graph.placeholder("x")
    there.meta["val"] = torch.empty(2)
    graph.output(graph.call_function(aten.div.Scalar, (there, 0.0)))
    gm = fx.GraphModule({}, graph)
    assert verdict(gm, gm) is None


def pooled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> torch.Tensor:
    loss = F.max_pool2d(model(x), 2).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def positions_elsewhere(gm: fx.GraphModule) -> None:
    """The gradient of a maximum goes to memory that is not the image's."""
    name = "aten::max_pool2d_with_indices_backward"
    node = next(n for n in gm.graph.nodes if is_operator(n.target, name))
    with gm.graph.inserting_before(node):
        far = call_function_with_meta(gm.graph, aten.mul.Tensor, (node.args[-1], 1 << 40))
    node.update_arg(len(node.args) - 1, far)


def test_what_brings_a_process_to_an_end_is_tried_elsewhere() -> None:
    model = nn.Conv2d(1, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gm = graphopt.capture(pooled, model, optimizer, torch.randn(2, 1, 8, 8)).graph_module
    text = refusal(gm, positions_elsewhere)
    assert re.search(
        r"no trial was made: an operator brought the process to an end \(SIG\w+\)", text
    )


def test_a_trial_that_does_not_end() -> None:
    with pytest.raises(EndedError, match="more than 1 s"):
        run_in_fork(lambda: time.sleep(60), 1.0)


def test_an_exception_of_a_trial() -> None:
    with pytest.raises(EndedError, match="exception"):
        run_in_fork(lambda: 1 / 0, 10.0)
    assert (
        run_in_fork(lambda: torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item(), 60.0)
        == 27e6
    )
