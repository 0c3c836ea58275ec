"""Steps that copy what they are given with `copy.deepcopy`; copies of fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import graphopt
from graphopt import _compat
from graphopt.errors import CaptureError
from twins import Twins, World

Step = Callable[[nn.Module, Optimizer, Tensor], Any]


def finish(optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def teacher(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    copied = copy.deepcopy(model).requires_grad_(False)
    return finish(optimizer, (model(x) - copied(2 * x)).square().mean())


def inner_loop(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    copied = copy.deepcopy(model)
    own = list(copied.parameters())
    gradients = torch.autograd.grad(copied(x).square().mean(), own)
    with torch.no_grad():
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter -= 0.1 * gradient
    loss = copied(x).square().mean()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, own), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss


def gradients_of_the_copy(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    copied = copy.deepcopy(model)
    loss: Tensor = copied(x).square().mean()
    loss.backward()
    for parameter, other in zip(model.parameters(), copied.parameters(), strict=True):
        parameter.grad = other.grad
    optimizer.step()
    return loss


def of_a_batch(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    copied = copy.deepcopy(x).mul_(2)
    return finish(optimizer, (model(x) - copied).square().mean())


def of_a_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    before = copy.deepcopy(model.state_dict())
    loss = finish(optimizer, model(x).square().mean())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(before[name], 0.5)
    return loss


def average(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return finish(optimizer, (model(x) - AveragedModel(model)(x).detach()).square().mean())


def layers_by_copies(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return finish(optimizer, nn.TransformerEncoder(layer, 2)(model(x)[None]).square().mean())


def returned(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
    return finish(optimizer, model(x).square().mean()), copy.deepcopy(model.state_dict())


STEPS = (
    teacher, inner_loop, gradients_of_the_copy, of_a_batch, of_a_state, average, layers_by_copies,
    returned,
)  # fmt: skip


LEAVE_GRADIENTS = (gradients_of_the_copy,)
"""The second call meets gradients, which eager's copies of parameters do not have."""


def build(step: Step) -> World:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    return World(step, [model], [torch.optim.AdamW(model.parameters(), lr=0.01)])


@pytest.mark.parametrize("step", STEPS)
def test_a_step_copies(step: Step) -> None:
    twins = Twins(lambda: build(step))
    for _ in range(3):
        twins.step(torch.randn(6, 4))
    assert len(twins.compiled.captures) == (2 if step in LEAVE_GRADIENTS else 1)


def test_a_copy_of_a_part() -> None:
    """Eager's copy shares memory with copies of the other parts."""
    with pytest.raises(CaptureError, match=r"shares its memory.*\n.*test_deepcopies\.py"):
        graphopt.capture(
            lambda model, x: model(copy.deepcopy(x[:, :4])), nn.Linear(4, 4), torch.ones(2, 8)
        )


def test_a_copy_that_is_kept() -> None:
    kept = []

    def step(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(copy.deepcopy(model))
        loss: Tensor = model(x).sum()
        return loss

    with pytest.raises(CaptureError, match="changes kept outside"):
        graphopt.capture(step, nn.Linear(4, 4), torch.ones(2, 4))


@pytest.mark.parametrize("step", STEPS)
def test_copies_of_fake_tensors(step: Step) -> None:
    with _compat.new_fake_mode():
        world, x = build(step), torch.ones(6, 4)
    captured = graphopt.capture(step, world.model, world.optimizer, x)
    assert len(captured.graph_module.graph.nodes) > 50


def test_fake_tensors_of_two_modes() -> None:
    with _compat.new_fake_mode():
        other = torch.ones(4)
    with _compat.new_fake_mode():
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=r"another FakeTensorMode.*\n.*test_deepcopies\.py"):
        graphopt.capture(lambda model, x: model(x) * other, model, x)
    graphopt.capture(lambda model, x, y: model(x) * y, model, x, other)


def test_a_copy_of_what_the_step_does_not_compute() -> None:
    """The average of a frozen weight is that weight."""

    def make() -> World:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.requires_grad_(False)
        average = nn.Linear(4, 4)

        def step(model: nn.Module, average: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
            loss = finish(optimizer, model(x).square().mean())
            with torch.no_grad():
                average.weight.copy_(model[1].weight)  # type: ignore[index]
            return loss

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return World(step, [model, average], [torch.optim.AdamW(trained, lr=0.01)])

    twins = Twins(make)
    for number in range(3):
        twins.step(torch.full((2, 4), float(number)))
    twins.finish(captures=1)
