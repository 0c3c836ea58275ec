"""Learning rates that a step computes in numpy, of counts and tables, and gives its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt


class Noam:
    """As FastSpeech 2 and others write it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count, self.warm_up = optimizer, 0, 4
        self.first = np.power(16, -0.5)

    def scale(self) -> Any:
        rates = [np.power(self.count, -0.5), np.power(self.warm_up, -1.5) * self.count]
        return np.min(rates)

    def step(self) -> None:
        self.count += 1
        rate = self.first * self.scale()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


class Minimum(Noam):
    def scale(self) -> Any:
        return self.warm_up**0.5 * np.minimum(self.count * self.warm_up**-1.5, self.count**-0.5)


class Constant(Noam):
    def scale(self) -> Any:
        return np.float64(0.25)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(0.9, 0.98)),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [Noam, Minimum, Constant])
def test_rates_are_as_in_eager_code(schedule: type[Noam], optimizer: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        scheduled = schedule(OPTIMIZERS[optimizer](model.parameters()))

        def step(x: Tensor, model: Any = model, scheduled: Any = scheduled) -> Tensor:
            loss = model(x).square().sum()
            scheduled.optimizer.zero_grad()
            loss.backward()
            scheduled.step()
            return loss

        used: Any = graphopt.compile(step) if compiled else step
        seen: list[Any] = []
        for x in torch.randn(6, 8, 4):
            seen.append(used(x).item())
            seen.append(repr(scheduled.optimizer.param_groups[0]["lr"]))
        found.append([*seen, scheduled.count, model.weight.tolist()])
    assert found[0] == found[1]
    assert len(used.captures) <= 2
