"""Values that a pass has rounded are put into the untouched graph; those that are wrong are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import fx

from graphopt.graph_utils import eliminate_dead_code, find_nodes, is_operator
from graphopt.manager import PassRegistry, graph_optimization_pass
from graphopt.testing import StepUnderTest, fake_ranks
from graphopt.testing.comparing import difference
from graphopt.testing.experiments import Experiment, Experiments
from graphopt.testing.runs import run
from graphopt.testing.substitution import Substitution
from numeric_variations import (
    E4M3,
    FACTOR,
    MODELS,
    Variation,
    behind,
    gradients,
    kept_in_bf16,
    products_in_bf16,
    read_in_bf16,
    reduced,
    rounded,
    rounded_and,
    rounded_to,
    scaled_while_sent,
    state,
    update,
    without_half_of_a_gradient,
)


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")


@pytest.fixture(autouse=True)
def _ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.function is test_without_ranks else fake_ranks(2):
        yield


def perceptron() -> StepUnderTest:
    torch.manual_seed(0)
    return StepUnderTest(*MODELS["perceptron"]())


def run_with(gm: fx.GraphModule, experiment: Experiment) -> dict[str, object]:
    return run(gm, experiment.make(), 1)  # type: ignore[return-value]


def substituted(step: StepUnderTest, vary: Variation) -> tuple[set[str], set[str]]:
    """The nodes that were read in place of others, and the values that differ nevertheless."""
    untouched, rewritten = step.graph_module, step.graph_module
    assert vary(rewritten)
    eliminate_dead_code(rewritten.graph)
    rewritten.recompile()
    placeholders = untouched.graph.find_nodes(op="placeholder")
    disturbed, *experiments = Experiments(placeholders, step.inputs)
    trials = [each for each in experiments if each.purpose in ("base", "trial")]
    as_it_is = partial(run_with, untouched)
    graphs = Substitution(untouched, rewritten, run_with, run_with, as_it_is)  # type: ignore[arg-type]
    graphs.choose(trials, disturbed)
    chosen, differing = set(), set()
    for trial in trials:
        expected, actual = graphs.run(trial)
        for where, was in expected.items():
            if "which is read in place of" in where:
                chosen.add(where.partition(",")[0].lstrip("%"))
            elif difference(actual[where], was):
                differing.add(where)
    return chosen, differing


def test_all_that_follows_from_rounded_gradients_is_expected_bit_for_bit() -> None:
    chosen, differing = substituted(perceptron(), partial(rounded_to, dtype=E4M3))
    assert len(chosen) == 4
    assert not differing


@pytest.mark.parametrize(
    "vary",
    [
        partial(gradients, factor=FACTOR),
        partial(read_in_bf16, kind="optimizer_state", name="exp_avg"),
        partial(kept_in_bf16, kind="parameter"),
        partial(state, name="exp_avg", factor=FACTOR),
        partial(update, factor=FACTOR),
    ],
)
def test_what_is_wrong_or_no_gradient_is_not_substituted(vary: Variation) -> None:
    chosen, differing = substituted(perceptron(), vary)
    assert not chosen
    assert differing


def test_one_wrong_gradient_is_not_substituted() -> None:
    chosen, differing = substituted(perceptron(), without_half_of_a_gradient)
    assert not chosen
    assert differing


def test_a_mistake_behind_rounded_gradients_is_all_that_differs() -> None:
    vary = rounded_and(E4M3, partial(state, name="exp_avg_sq", factor=FACTOR))
    chosen, differing = substituted(perceptron(), vary)
    assert len(chosen) == 4
    assert differing
    assert all("exp_avg_sq" in where for where in differing)


def test_values_that_are_scaled_on_their_way_are_compared_behind_it() -> None:
    step = perceptron()
    chosen, differing = substituted(step, scaled_while_sent)
    assert sum(name.startswith("div") for name in chosen) == 4
    assert not {name for name in chosen if name.startswith(("_to_copy", "mul", "wait"))}
    assert not differing


def test_rounding_in_the_forward_is_followed_from_product_to_product() -> None:
    chosen, differing = substituted(perceptron(), products_in_bf16)
    assert chosen
    assert not {where for where in differing if "result" not in where}


def round_gradients(gm: fx.GraphModule, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Without ranks, what the backward leaves for the optimizer."""
    last = {
        node
        for node in gm.graph.nodes
        if node.meta.get("phase") == "backward"
        and any(user.meta.get("phase") == "optimizer" for user in node.users)
    }
    for node in last:
        behind(gm, node, lambda n=node: rounded(gm, n, dtype))
    return bool(last)


@pytest.mark.parametrize(
    ("vary", "is_right"),
    [(round_gradients, True), (lambda gm: update(gm, FACTOR) and round_gradients(gm), False)],
)
def test_without_ranks(vary: Callable[[fx.GraphModule], bool], is_right: bool) -> None:
    step = perceptron()
    assert not reduced(step.graph_module)
    assert find_nodes(step.graph_module.graph, lambda n: is_operator(n.target, "aten::mm"))

    def varied(gm: fx.GraphModule) -> None:
        assert vary(gm)

    declare = graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)
    expected = (
        nullcontext() if is_right else pytest.raises(AssertionError, match="times what it was")
    )
    with expected:
        step.check(declare(varied), idempotent=False)
