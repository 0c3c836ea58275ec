"""Rates that a step asks its scheduler for, behind the step of the scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import graphopt

Make = Callable[[Any], Any]
SCHEDULERS: list[Make] = [
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=30),
]


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_rates_of_get_lr(make: Make, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler, rates = make(optimizer), []

        def step(x: torch.Tensor) -> None:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for _ in range(times):
                scheduler.step()
                print(f"{scheduler.get_lr()[0]:.8f} {scheduler.get_last_lr()[0]:.8f}")
            rates.append(scheduler.get_lr()[0])

        called = graphopt.compile(step) if compiled else step
        for _ in range(6):
            called(torch.randn(4, 3))
        return rates, model.weight.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = run(False), capsys.readouterr().out
        assert eager == (run(True), capsys.readouterr().out)


def test_what_reading_rates_raises() -> None:
    """`get_lr` warns, and warnings are errors here."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))

    @graphopt.compile
    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()
        return scheduler.get_lr()

    with pytest.raises(UserWarning, match="To get the last learning rate"):
        step(torch.ones(1, 3))
