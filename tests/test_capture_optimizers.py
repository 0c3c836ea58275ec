"""Every optimizer that can be captured against itself run eagerly, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from twins import Twins, World, world
from zoo import MODELS, MUON, OPTIMIZERS, Checkpointed, train_step

STEPS = 6


def run(build: Callable[[], World], steps: int = STEPS, captures: int | None = 1) -> Twins:
    twins = Twins(build)
    for i in range(steps):
        twins.step(*MODELS["mlp"].batch(i))
    twins.finish(captures)
    return twins


def expected_captures(name: str) -> int:
    """Two where the first step computes something else than the later ones: the momentum of SGD
    with dampening, and that of the fused kernel, which is told so."""
    momentum = name.startswith(("sgd-momentum", "sgd-nesterov", "sgd-dampening"))
    return 2 if momentum and name.endswith(("dampening-loop", "dampening-foreach", "fused")) else 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    run(lambda: world(optimizer=name), captures=expected_captures(name))


@pytest.mark.skipif(MUON is None, reason="this torch has no torch.optim.Muon")
def test_muon() -> None:
    def build() -> World:
        model = MODELS["mlp"].make()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return World(step_of_two, [model], [MUON(matrices), torch.optim.AdamW(rest, lr=1e-2)])

    run(build)


def step_of_two(model: nn.Module, first: Optimizer, second: Optimizer, x: Any, y: Any) -> Any:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("name", ["adamw-fused", "adam-foreach", "sgd-momentum-loop"])
@pytest.mark.parametrize("model", ["partial", "gpt", "shared-storage"])
def test_optimizer_over_other_models(name: str, model: str) -> None:
    """Parameters without gradient, with two names, and in one storage."""
    twins = Twins(lambda: world(model=model, optimizer=name))
    for i in range(STEPS):
        twins.step(*MODELS[model].batch(i))
    twins.finish(captures=1)


def grouped(model: nn.Module, kind: type[Optimizer], **settings: Any) -> Optimizer:
    """Three groups: decayed matrices, vectors without decay, and a head with its own rate."""
    body = list(model.layers.parameters())
    return kind(
        [
            {"params": [p for p in body if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in body if p.ndim < 2], "weight_decay": 0.0},
            {"params": model.head.parameters(), "lr": 3e-2},
        ],
        lr=1e-2,
        **settings,
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    ],
    ids=["adamw-fused", "adam-foreach", "sgd-loop"],
)
def test_parameter_groups(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    def build() -> World:
        model = MODELS["mlp"].make()
        return World(train_step, [model], [grouped(model, kind, **settings)])

    run(build)


def lambda_lr(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda i: 1.0 / (1.0 + 0.3 * i))


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    """Cycles the first beta of Adam and the momentum of SGD along with the learning rate."""
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=20, cycle_momentum=True)


SCHEDULED = ["adamw-loop", "adamw-foreach", "adamw-fused", "sgd-momentum-foreach"]


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("schedule", [lambda_lr, one_cycle], ids=["lambda", "one-cycle"])
def test_scheduler(name: str, schedule: Callable[[Optimizer], Any]) -> None:
    """The scheduler changes numbers after every step; no step is captured anew for that."""

    def build() -> World:
        built = world(optimizer=name)
        built.extra["scheduler"] = schedule(built.optimizer)
        return built

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(*MODELS["mlp"].batch(i))
        twins.both(lambda w: w.extra["scheduler"].step())
    twins.finish(captures=1)
    rates = twins.captured.extra["scheduler"].get_last_lr()
    assert rates != [OPTIMIZERS[name]([torch.zeros(1)]).param_groups[0]["lr"]]


@pytest.mark.parametrize("name", ["rmsprop-foreach", "nadam-loop", "adagrad-fused", "rprop-loop"])
def test_learning_rate_set_by_hand(name: str) -> None:
    twins = Twins(lambda: world(optimizer=name))
    for i in range(STEPS):
        twins.step(*MODELS["mlp"].batch(i))
        twins.both(lambda w, i=i: set_lr(w.optimizer, 0.01 / (i + 1)))
    twins.finish(expected_captures(name))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def test_reduce_on_plateau() -> None:
    def build() -> World:
        built = world(optimizer="adamw-foreach")
        built.extra["scheduler"] = ReduceLROnPlateau(built.optimizer, patience=0, factor=0.5)
        return built

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(*MODELS["mlp"].batch(i))
        twins.both(lambda w, i=i: w.extra["scheduler"].step(1.0 + i))
    twins.finish(captures=1)
    assert twins.captured.optimizer.param_groups[0]["lr"] < 1e-3


@pytest.mark.parametrize("flag", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_learning_rate_as_tensor(flag: dict[str, bool]) -> None:
    """A tensor as learning rate is the user's object: it stays in the group, changed in place."""

    def build() -> World:
        model = MODELS["mlp"].make()
        rate = torch.tensor(1e-2)
        return World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=rate, **flag)])

    twins = Twins(build)
    rate = twins.captured.optimizer.param_groups[0]["lr"]
    for i in range(STEPS):
        twins.step(*MODELS["mlp"].batch(i))
        twins.both(lambda w: w.optimizer.param_groups[0]["lr"].mul_(0.7))
    twins.finish(captures=1)
    assert twins.captured.optimizer.param_groups[0]["lr"] is rate


def test_default_implementation_is_the_eager_one() -> None:
    """With neither foreach nor fused given, torch picks by device; so must the capture."""

    def build() -> World:
        model = MODELS["mlp"].make()
        return World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])

    run(build)


def test_nan_gradients() -> None:
    twins = Twins(lambda: world(optimizer="adamw-fused"))
    x, y = MODELS["mlp"].batch(0)
    twins.step(x, y)
    for _ in range(4):
        twins.step(x * float("nan"), y)
    twins.finish(captures=1)
    assert twins.captured.model.head.weight.isnan().all()


def test_closure() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Any, y: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    def build() -> World:
        built = world(optimizer="sgd-momentum-foreach")
        return World(step, built.models, built.optimizers)

    run(build)


def test_step_hooks_of_the_optimizer() -> None:
    """Hooks that stay within tensors are part of the step. They may look at its state: a graph of
    its own makes that."""

    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def build() -> World:
        built = world(optimizer="sgd-momentum-loop")
        built.optimizer.register_step_pre_hook(halve)
        return built

    run(build, captures=2)


def test_checkpointed_model_with_fused_adam() -> None:
    def build() -> World:
        model = Checkpointed(use_reentrant=False)
        return World(train_step, [model], [OPTIMIZERS["adam-fused"](model.parameters())])

    run(build)
