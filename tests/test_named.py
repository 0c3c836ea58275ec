"""What the code of a step names is there in its first trace: modules, optimizers and tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.tracing.inputs.named_in_code import named_in


class Trainer:
    """A model, an optimizer and a tensor in an object that is no module."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.weights = nn.Linear(3, 2), torch.rand(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.asked = 0

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.weights).square().mean()

    def update(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return self.update(x)

    @functools.cached_property
    def average(self) -> nn.Module:
        self.asked += 1
        return nn.Linear(3, 2)

    def left(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


Style = Callable[[Trainer], Callable[[Tensor], Tensor]]


def in_closure(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    model, optimizer, weights = trainer.model, trainer.optimizer, trainer.weights

    def loss_of(x: Tensor) -> Tensor:
        return (model(x) * weights).square().mean()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_object(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    return lambda x: trainer.update(x)


def in_attributes(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    held = SimpleNamespace(of=SimpleNamespace(trainer=trainer))

    @torch.enable_grad()
    def step(x: Tensor) -> Tensor:
        return held.of.trainer(x)

    return step


def in_lists(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    models, optimizers = [trainer.model], (trainer.optimizer,)

    def step(x: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum((model(x) * trainer.weights).square().mean() for model in models)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


STYLES: list[Style] = [
    in_closure,
    in_object,
    in_attributes,
    in_lists,
    lambda trainer: trainer,
    lambda trainer: trainer.update,
    lambda trainer: functools.partial(trainer.update),
]


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_traced_to_find_it(style: Style, traces: list[int]) -> None:
    captured, eager = Trainer(), Trainer()
    step, reference = graphopt.compile(style(captured)), style(eager)
    for _ in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), reference(x))
        assert captured.left() == eager.left()
    assert traces[0] <= 2  # the next step, which finds gradients, may be traced besides


def test_what_may_be_left_alone_is_not_named() -> None:
    trainer, other = Trainer(), nn.Linear(3, 2)

    def step(x: Tensor, more: bool = False) -> Tensor:
        if more:
            other(x)
        else:
            trainer.average(x)
        while more:
            more = bool(other.training)
        return trainer.loss(x)

    found = named_in(step, (torch.ones(1, 3),), {})
    assert [name for name, _ in found.objects] == ["trainer.model"]
    assert [name for name, _ in found.tensors] == ["trainer.weights", "x"]
    assert trainer.asked == 0


def test_what_is_named_and_left_alone_is_no_input() -> None:
    trainer, other, unused = Trainer(), nn.Linear(3, 2), torch.rand(3)

    def step(x: Tensor) -> Tensor:
        assert other is not None and unused is not None
        return trainer.update(x)

    captured = graphopt.compile(step)
    eager = Trainer()
    x = torch.rand(4, 3)
    assert torch.equal(captured(x), eager.update(x))
    besides = captured.captures[-1].besides
    objects = {reference() for _, reference in besides.objects}
    assert objects == {trainer.model, trainer.optimizer}
    assert [tensor for _, tensor in besides.tensors] == [trainer.weights]


def test_what_cannot_be_captured_may_be_named() -> None:
    trainer, parallel = Trainer(), nn.DataParallel(nn.Linear(3, 2))
    parallel.device_ids = [0]

    def step(x: Tensor) -> Tensor:
        assert parallel is not None
        return trainer.update(x)

    x = torch.rand(4, 3)
    assert torch.equal(graphopt.compile(step)(x), Trainer().update(x))


def test_another_one_in_its_place_is_used() -> None:
    trainer, eager = Trainer(), Trainer()
    step = graphopt.compile(in_object(trainer))
    for seed in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), eager.update(x))
        torch.manual_seed(seed)
        trainer.weights = eager.weights = torch.rand(2)


def test_a_module_within_another_is_named_as_part_of_it() -> None:
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, weight = whole[0], whole[1].weight

    def step(x: Tensor) -> Tensor:
        loss = (whole(x).sum() + first(x).sum()) * weight.sum()
        loss.backward()
        return loss.detach()

    captured = graphopt.compile(step)
    captured(torch.rand(4, 3))
    assert [name for name, _ in captured.captures[-1].besides.objects] == ["whole"]
    assert not captured.captures[-1].besides.tensors
