"""A captured step against the eager one, bit for bit, over models and over kinds of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from steps import RETURNS, step_keeping_gradients, the_weight
from twins import Twins, World, assert_same, world
from zoo import MLP, MODELS, train_step

STEPS = 5


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    case = MODELS[name]
    twins = Twins(lambda: world(model=name))
    for i in range(STEPS):
        twins.step(*case.batch(i))
    # One capture creates the optimizer state, the other is every step from then on.
    twins.finish(captures=1)


def test_parameters_change_as_they_do_in_eager() -> None:
    """The comparison above would also hold for a step that does nothing on either side."""
    case = MODELS["mlp"]
    twins = Twins(world)
    before = [p.detach().clone() for p in twins.captured.model.parameters()]
    twins.step(*case.batch(0))
    after = list(twins.captured.model.parameters())
    assert not any(torch.equal(b, a) for b, a in zip(before, after, strict=True))


def test_unused_parameter_keeps_no_gradient() -> None:
    case = MODELS["partial"]
    twins = Twins(lambda: world(step_keeping_gradients, "partial"))
    for i in range(STEPS):
        twins.step(*case.batch(i))
    model = twins.captured.model
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.body.weight.grad is not None


@pytest.mark.parametrize("step", RETURNS, ids=lambda step: step.__name__)
def test_what_the_step_returns(step: Callable[..., Any]) -> None:
    case = MODELS["mlp"]
    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        twins.step(*case.batch(i))
    twins.finish(captures=1)


def test_returned_parameter_is_the_parameter() -> None:
    case = MODELS["mlp"]
    twins = Twins(lambda: world(the_weight))
    first, second = (twins.step(*case.batch(i)) for i in range(2))
    assert first.data_ptr() == second.data_ptr() == twins.captured.model.head.weight.data_ptr()


def adversarial_step(
    generator: nn.Module,
    critic: nn.Module,
    generator_optimizer: Optimizer,
    critic_optimizer: Optimizer,
    noise: Tensor,
    real: Tensor,
) -> tuple[Tensor, Tensor]:
    critic_optimizer.zero_grad()
    fake = generator(noise)
    critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
    critic_loss.backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    generator_loss = F.softplus(-critic(fake)).mean()
    generator_loss.backward()
    generator_optimizer.step()
    return generator_loss, critic_loss


def adversaries() -> World:
    generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = MLP()
    return World(
        adversarial_step,
        [generator, critic],
        [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (generator, critic)],
    )


def test_two_models_in_one_step() -> None:
    twins = Twins(adversaries)
    for i in range(STEPS):
        noise, _ = MODELS["mlp"].batch(i)
        real, _ = MODELS["mlp"].batch(100 + i)
        twins.step(noise, real)
    twins.finish(captures=1)


def test_two_models_with_a_step_each() -> None:
    pairs = [(Twins(lambda n=n: world(model=n)), MODELS[n]) for n in ("convnet", "gpt")]
    for i in range(STEPS):
        for twins, case in pairs:
            twins.step(*case.batch(i))
    for twins, _ in pairs:
        twins.finish(captures=1)


def test_one_step_function_for_two_models() -> None:
    """One compiled step, called with two models in turn: each has its own captures."""
    worlds = {side: [seeded(n) for n in (3, 4)] for side in ("eager", "captured")}
    step = graphopt.compile(train_step, pipeline="none")
    for i in range(STEPS):
        batch = MODELS["mlp"].batch(i)
        for eager, captured in zip(worlds["eager"], worlds["captured"], strict=True):
            expected = train_step(eager.model, eager.optimizer, *batch)
            actual = step(captured.model, captured.optimizer, *batch)
            assert_same(actual, expected, "loss")
            assert_same(captured.state(), eager.state(), "state")
    assert len(step.captures) == 2


def seeded(seed: int, model: str = "mlp") -> World:
    torch.manual_seed(seed)
    return world(model=model)


@pytest.mark.parametrize("model", ["mlp", pytest.param("convnet", marks=pytest.mark.full)])
def test_one_model_captured_twice(model: str) -> None:
    """Two compiled steps train one model in turn, over one optimizer."""
    eager, captured = seeded(5, model), seeded(5, model)
    functions = [train_step, step_keeping_gradients]
    steps = [graphopt.compile(function, pipeline="none") for function in functions]
    for i in range(2 * STEPS):
        batch = MODELS[model].batch(i)
        expected = functions[i % 2](eager.model, eager.optimizer, *batch)
        actual = steps[i % 2](captured.model, captured.optimizer, *batch)
        assert_same(actual, expected, "loss")
        assert_same(captured.state(), eager.state(), "state")


def test_capture_alone_changes_nothing() -> None:
    case = MODELS["convnet"]
    before, after = seeded(6, "convnet"), seeded(6, "convnet")
    rng = torch.get_rng_state()
    captured = graphopt.capture(train_step, after.model, after.optimizer, *case.batch(0))
    assert torch.equal(torch.get_rng_state(), rng)
    assert_same(after.state(), before.state(), "state")
    kinds = [spec.kind for spec in captured.inputs]
    order = ["parameter", "buffer", "optimizer_state", "gradient", "hyperparameter", "user_input"]
    assert kinds == sorted(kinds, key=order.index)
    assert {"parameter", "buffer", "hyperparameter", "user_input"} <= set(kinds)


def test_decorator_with_and_without_arguments() -> None:
    case = MODELS["mlp"]
    eager, first, second = (seeded(6) for _ in range(3))

    @graphopt.compile
    def bare(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y)

    @graphopt.compile(pipeline="none")
    def configured(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y)

    assert [bare.__name__, configured.__name__] == ["bare", "configured"]
    for i in range(STEPS):
        expected = train_step(eager.model, eager.optimizer, *case.batch(i))
        for step, run in ((bare, first), (configured, second)):
            assert_same(step(run.model, run.optimizer, *case.batch(i)), expected, "loss")
    for step, run in ((bare, first), (configured, second)):
        step.flush()
        assert_same(run.state(), eager.state(), "state")
