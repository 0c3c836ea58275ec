"""`check_pass`: on the step that all calls but the first run; rounding is told from mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.graph_utils import find_nodes, is_operator
from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphopt.testing import StepUnderTest, check_pass, fake_ranks
from numeric_variations import (
    FURTHER_HONEST,
    FURTHER_MODELS,
    FURTHER_WRONG,
    HONEST,
    MODELS,
    WRONG,
    Variation,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Trainer:
    """A step that is a method: model and optimizer are no arguments."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = model()
        self.optimizer = make(self.model.parameters())

    def step(self, x: Tensor) -> Tensor:
        return train_step(self.model, self.optimizer, x)


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_late_pass_finds_work_where_the_optimizer_has_no_state_yet(name: str) -> None:
    made = model()
    args = made, OPTIMIZERS[name](made.parameters()), torch.randn(3, 4)
    before = {key: value.clone() for key, value in made.state_dict().items()}
    assert check_pass(train_step, args, "iter_move_grads_and_optimizers").changes
    assert not args[1].state, "the check works on copies"
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "rmsprop"])
def test_a_method_is_checked_without_touching_its_object(name: str) -> None:
    trainer = Trainer(OPTIMIZERS[name])
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    record = check_pass(trainer.step, (torch.randn(3, 4),), "iter_move_grads_and_optimizers")
    assert record.changes and not trainer.optimizer.state
    now = trainer.model.state_dict()
    assert all(torch.equal(value, before[key]) for key, value in now.items())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_step_without_state_is_checked_as_it_is_given() -> None:
    made = model()
    args = made, torch.optim.SGD(made.parameters(), lr=0.1), torch.randn(3, 4)
    under_test = StepUnderTest(train_step, args)
    for node, value in zip(
        under_test.graph_module.graph.find_nodes(op="placeholder"), under_test.inputs, strict=True
    ):
        if node.meta.get("kind") == "parameter":
            assert torch.equal(value, made.get_parameter(node.meta["fqn"]))


def test_the_graph_that_is_captured_is_that_of_compile() -> None:
    made = model()
    args = made, torch.optim.AdamW(made.parameters()), torch.randn(3, 4)
    kinds = {
        warm: [entry.kind for entry in graphopt.capture(train_step, *args, warm=warm).inputs]
        for warm in (False, True)
    }
    assert "optimizer_state" not in kinds[False]
    assert kinds[True].count("optimizer_state") == 3 * 4


def test_a_check_in_which_nothing_changed_fails_with_the_reason() -> None:
    @graphopt.graph_optimization_pass(registry=PassRegistry())
    def find_nothing(gm: Any) -> int:
        return 0

    args = nn.Linear(4, 2), torch.optim.SGD([torch.ones(1)], lr=0.1), torch.randn(3, 4)
    with pytest.raises(AssertionError, match="find_nothing changed nothing in this step"):
        check_pass(train_step, args, find_nothing)
    check_pass(train_step, args, find_nothing, changes=0)
    check_pass(train_step, args, find_nothing, may_change_nothing=True)


def test_passes_that_run_first_have_options() -> None:
    made = model()
    args = made, torch.optim.SGD(made.parameters(), lr=0.1), torch.randn(3, 4)
    step = StepUnderTest(train_step, args)
    few = step.check("schedule_comm_wait", after="comm_fusion_with_concat")
    many = step.check("schedule_comm_wait", after="comm_fusion_with_concat(bucket_size_mb=1e-9)")
    assert (few.collectives_before, many.collectives_before) == (1, 4)
    with pytest.raises(graphopt.GraphOptError, match="bucket_size_mb"):
        step.check("schedule_comm_wait", after="comm_fusion_with_concat(bucket_size=1)")


ALL_MODELS = {**MODELS, **FURTHER_MODELS}
ALL_WRONG, ALL_HONEST = {**WRONG, **FURTHER_WRONG}, {**HONEST, **FURTHER_HONEST}
SEEDS = 24


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers decide here."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")


@cache
def step_of(model: str, seed: int = 0) -> StepUnderTest:
    torch.manual_seed(seed)
    function, args = ALL_MODELS[model]()
    return StepUnderTest(function, args, warm=True)


def declared(variation: Variation) -> Pass:
    def varied(gm: fx.GraphModule) -> None:
        variation(gm)

    return graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)(varied)


def applies(step: StepUnderTest, variation: Variation) -> bool:
    return variation(step.graph_module)


def refuses(step: StepUnderTest, variation: Variation) -> bool:
    try:
        step.check(declared(variation), idempotent=False)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("model", "name"), list(product(MODELS, WRONG)))
def test_wrong_numeric_pass_is_refused(model: str, name: str) -> None:
    step = step_of(model)
    if applies(step, WRONG[name]):  # the step has such a term
        assert refuses(step, WRONG[name])


@pytest.mark.parametrize("name", FURTHER_WRONG)
def test_further_mistakes_are_refused(name: str) -> None:
    """On two models that have such a term, others for each."""
    variation, start = FURTHER_WRONG[name], list(FURTHER_WRONG).index(name)
    models = list(ALL_MODELS)
    turned = [models[(start + i) % len(models)] for i in range(len(models))]
    having = [model for model in turned if applies(step_of(model), variation)][:2]
    assert having
    assert all(refuses(step_of(model), variation) for model in having)


@pytest.mark.parametrize(("model", "name"), list(product(MODELS, HONEST)))
def test_honest_numeric_pass_is_accepted(model: str, name: str) -> None:
    step = step_of(model)
    if applies(step, HONEST[name]):
        assert step.check(declared(HONEST[name]), idempotent=False).changed


@pytest.mark.parametrize(("model", "name"), list(product(FURTHER_MODELS, FURTHER_HONEST)))
def test_further_honest_passes_are_accepted(model: str, name: str) -> None:
    step = step_of(model)
    if applies(step, FURTHER_HONEST[name]):
        assert step.check(declared(FURTHER_HONEST[name]), idempotent=False).changed


@pytest.mark.parametrize(
    ("model", "seed", "name"),
    [
        ("convolution", 1, "sent as f16"),  # a gradient that is rounding alone becomes zero
        ("perceptron", 4, "rounded to e4m3"),
        ("plain", 6, "rounded to e5m2"),  # the norm, and with it all elements, is rounded
    ],
)
def test_honest_passes_that_were_refused_once(model: str, seed: int, name: str) -> None:
    assert not refuses(step_of(model, seed), HONEST[name])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(SEEDS))
def test_rounding_is_told_from_mistakes_whatever_the_numbers(seed: int) -> None:
    """Every mistake is refused, and no honest pass."""
    step = step_of(list(ALL_MODELS)[seed % len(ALL_MODELS)], seed)
    refused = [
        {name for name, each in table.items() if applies(step, each) and refuses(step, each)}
        for table in (ALL_WRONG, ALL_HONEST)
    ]
    assert refused[0] == {name for name, each in ALL_WRONG.items() if applies(step, each)}
    assert not refused[1]


def test_there_are_enough_of_both() -> None:
    wrong, honest = (
        sum(applies(step_of(model), made) for model in MODELS for made in table.values())
        for table in (WRONG, HONEST)
    )
    assert wrong >= 60
    assert honest >= 20


def test_one_number_that_is_another_is_refused() -> None:
    """Noise of a result that nearly cancels does not excuse any value."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x.t() @ model(x)).sum()

    def untransposed(gm: fx.GraphModule) -> None:
        (x,) = (node for node in gm.graph.find_nodes(op="placeholder") if node.target == "x")
        for product_ in find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::mm")):
            product_.args = (x, product_.args[1])

    torch.manual_seed(0)
    declare = graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)
    under_test = StepUnderTest(step, (nn.Linear(4, 4), torch.randn(4, 4)))
    with pytest.raises(AssertionError, match="changes result 0"):
        under_test.check(declare(untransposed), idempotent=False)
