"""Gradients and mixed precision inside a captured step, bit for bit as in eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from steps import GRADIENT_STEPS, accumulate, autocast_step, zero_not_none
from twins import Twins, World, world
from zoo import MLP, MODELS, OPTIMIZERS, train_step

STEPS = 5
MLP_CASE = MODELS["mlp"]


def run(step: Callable[..., Any], model: str = "mlp", captures: int = 1) -> None:
    twins = Twins(lambda: world(step, model))
    for i in range(STEPS):
        twins.step(*MODELS[model].batch(i))
    twins.finish(captures)


@pytest.mark.parametrize("step", GRADIENT_STEPS, ids=lambda step: step.__name__)
def test_gradients(step: Callable[..., Any]) -> None:
    """Gradients set to zero, and not dropped, are added to from the second step on."""
    run(step, captures=2 if step is zero_not_none else 1)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clip_with_parameters_the_step_closes_over(clip: Callable[..., Any]) -> None:
    def build() -> World:
        built = world()
        parameters = list(built.model.parameters())

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip(parameters, 0.02)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return World(step, built.models, built.optimizers)

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i))
    twins.finish(captures=1)


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halve_in_place(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def halve_all(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


def shift(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "tensor": lambda layer: layer.weight.register_hook(halve),
    "accumulated": lambda layer: layer.weight.register_post_accumulate_grad_hook(halve_in_place),
    "backward": lambda layer: layer.register_full_backward_hook(halve_all),
    "forward": lambda layer: layer.register_forward_hook(shift),
}


def hooked(hook: str) -> World:
    built = world(optimizer="sgd-momentum-foreach")
    HOOKS[hook](built.model.layers[1])
    return built


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str) -> None:
    """Hooks that stay within tensors are part of the step, on modules and on parameters."""
    twins = Twins(lambda: hooked(hook))
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i))
    twins.finish(captures=1)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_a_layer_that_is_frozen_for_a_while(hook: str) -> None:
    def freeze_or_not(w: World) -> None:
        layer = w.model.layers[1]
        layer.requires_grad_(not layer.weight.requires_grad)

    twins = Twins(lambda: hooked(hook))
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i))
        twins.both(freeze_or_not)
    twins.finish()


NUMBERS_VIEWED: dict[str, Callable[[Tensor], Tensor]] = {
    "imaginary": lambda h: h * 1j,
    "complex": lambda h: (h * (1 + 2j)) / (0.5 - 1j),
    "real times": lambda h: h.real * 1j,
    "power": lambda h: h ** (0.5 + 1j),
    "minus": lambda h: (1j - h) - 2j * h,
}


@pytest.mark.parametrize("name", NUMBERS_VIEWED)
def test_complex_numbers_of_python(name: str) -> None:
    """Backwards view their conjugates."""

    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.phase = nn.Linear(8, 8), nn.Parameter(torch.randn(4).cfloat())

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.linear(x).reshape(-1, 4, 2)) * self.phase
            return NUMBERS_VIEWED[name](pairs).abs()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def build() -> World:
        model = Phases()
        return World(step, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])

    twins = Twins(build)
    for _ in range(3):
        twins.step(torch.randn(3, 8))
    twins.finish(captures=1)


@pytest.mark.parametrize("model", ["mlp", "partial", "convnet"])
def test_accumulation_over_several_calls(model: str) -> None:
    twins = Twins(lambda: world(accumulate, model))
    captures = []
    for i in range(12):
        last = i % 3 == 2
        with nullcontext() if last else twins.no_sync():
            twins.step(*MODELS[model].batch(i), last)
        captures.append(len(twins.compiled.captures))
    # The second round meets the optimizer's state for the first time; later ones bring nothing new.
    twins.finish(captures=captures[5])


def test_backward_without_an_optimizer_step() -> None:
    def build() -> World:
        built = world()

        def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return World(step, built.models, [], {"optimizer": built.optimizer})

    def update(w: World) -> None:
        w.extra["optimizer"].step()
        w.extra["optimizer"].zero_grad()

    twins = Twins(build)
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(2 * i))
        twins.step(*MLP_CASE.batch(2 * i + 1))
        twins.both(update)
    twins.finish(captures=2)


def test_the_user_reads_and_changes_gradients_between_steps() -> None:
    """Gradients left by a step can be read, scaled, replaced and removed by the loop."""

    def edit(w: World) -> float:
        first, second, *_ = w.model.parameters()
        first.grad = None
        second.grad = torch.ones_like(second)
        w.model.head.weight.grad.mul_(0.5)
        return float(w.model.head.weight.grad.sum())

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(lambda: world(step))
    for i in range(STEPS):
        twins.step(*MLP_CASE.batch(i))
        twins.both(edit)
    twins.finish()


@pytest.mark.parametrize("model", ["gpt", "reused", "checkpointed"])
def test_autocast_inside_the_step(model: str) -> None:
    run(autocast_step, model)


@pytest.mark.parametrize("model", ["gpt", "reused"])
def test_autocast_around_the_step(model: str) -> None:
    twins = Twins(lambda: world(model=model))
    for i in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            twins.step(*MODELS[model].batch(i))
    twins.finish(captures=1)


@pytest.mark.full
def test_bf16_and_float64_parameters() -> None:
    for dtype in (torch.bfloat16, torch.float64):

        def build(dtype: torch.dtype = dtype) -> World:
            model = MLP().to(dtype)
            return World(train_step, [model], [OPTIMIZERS["adamw-foreach"](model.parameters())])

        twins = Twins(build)
        for i in range(STEPS):
            x, y = MLP_CASE.batch(i)
            twins.step(x.to(dtype), y)
        twins.finish(captures=1)
