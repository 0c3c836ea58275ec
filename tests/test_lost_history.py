"""Tensors that a call leaves with a history in eager code: no backward goes through them unseen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Step = Callable[[Tensor], Any]


class Trainer:
    """A model whose losses are kept from call to call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.total: Any = 0.0
        self.calls = 0
        self.mean = 0.0
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def summed_in_attribute(trainer: Trainer, x: Tensor) -> None:
    trainer.total = trainer.total + trainer.loss(x)
    trainer.calls += 1
    if trainer.calls % 2 == 0:
        trainer.update(trainer.total)
        trainer.total = 0.0


def summed_in_place(trainer: Trainer, x: Tensor) -> None:
    trainer.total += trainer.loss(x)
    trainer.update(trainer.total)


def summed_in_list(trainer: Trainer, x: Tensor) -> None:
    trainer.losses.append(trainer.loss(x))
    trainer.update(trainer.losses[-1] + trainer.losses[0])


@pytest.mark.parametrize("step", [summed_in_attribute, summed_in_place, summed_in_list])
def test_a_backward_through_earlier_calls_is_refused(
    step: Callable[[Trainer, Tensor], None],
) -> None:
    trainer, compiled = Trainer(), graphopt.compile(step)
    weights = trainer.model.weight
    error: CaptureError | None = None
    for _ in range(3):
        before = weights.detach().clone()
        try:
            compiled(trainer, torch.ones(4, 3))
        except CaptureError as refusal:
            error = refusal
            break
    assert error is not None
    assert torch.equal(weights, before)
    assert error.location is not None
    assert "backward()" in error.location or "update(" in error.location


def test_a_backward_through_an_argument_of_an_earlier_call_is_refused() -> None:
    trainer = Trainer()

    def step(x: Tensor, total: Tensor) -> Tensor:
        total = total + trainer.loss(x)
        trainer.update(total)
        return total

    compiled = graphopt.compile(step)
    total = compiled(torch.ones(4, 3), torch.zeros(()))
    with pytest.raises(CaptureError, match="an earlier call has computed"):
        compiled(torch.ones(4, 3), total)
    compiled(torch.ones(4, 3), total.detach())
    assert len(compiled.captures) == 1


def running_mean(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x)
    trainer.total += loss
    trainer.calls += 1
    trainer.update(loss)
    trainer.mean = (trainer.total / trainer.calls).item()


def detached_when_read(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x) + (trainer.total.detach() if trainer.calls else 0.0)
    trainer.calls += 1
    trainer.total = loss
    trainer.update(loss)


def cut_by_no_grad(trainer: Trainer, x: Tensor) -> None:
    loss = trainer.loss(x)
    with torch.no_grad():
        trainer.total = 0.9 * trainer.total + 0.1 * loss
    trainer.update(loss)


@pytest.mark.parametrize("step", [running_mean, detached_when_read, cut_by_no_grad])
def test_what_no_backward_goes_through_is_as_in_eager(
    step: Callable[[Trainer, Tensor], None],
) -> None:
    found = []
    for run in (step, graphopt.compile(step)):
        trainer, values = Trainer(), []
        for index in range(5):
            run(trainer, torch.full((4, 3), 0.1 * index))
            values.append((trainer.total.detach().clone(), trainer.model.weight.detach().clone()))
        found.append((values, trainer.mean))
    eager, captured = found
    assert captured[1] == eager[1]
    for mine, theirs in zip(captured[0], eager[0], strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_program_may_cut_the_history_between_calls() -> None:
    cell, state = nn.RNNCell(2, 2), SimpleNamespace(hidden=torch.zeros(1, 2))
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)

    @graphopt.compile
    def step(x: Tensor) -> None:
        state.hidden = cell(x, state.hidden)
        optimizer.zero_grad()
        state.hidden.square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(torch.ones(1, 2))
        state.hidden = state.hidden.detach()
    step(torch.ones(1, 2))
    with pytest.raises(CaptureError, match="an earlier call has computed"):
        step(torch.ones(1, 2))
