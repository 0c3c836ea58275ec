"""What a step reads from outside its arguments: followed when it changes, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from outside_cases import CASES

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 0])


def scaled_step(factor: Callable[[], Any]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) * factor()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Trained:
    """A model, trained by a compiled step at rate 0, so that eager gives the same every time."""

    def __init__(self, step: Callable[..., Any], model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.step, self.compiled = step, graphopt.compile(step, pipeline="none")

    def check(self) -> None:
        """A captured step gives what the eager one gives."""
        expected = self.step(self.model, self.optimizer, X, Y)
        assert torch.equal(self(), expected)

    def __call__(self) -> Tensor:
        loss: Tensor = self.compiled(self.model, self.optimizer, X, Y)
        return loss

    @property
    def captures(self) -> int:
        return len(self.compiled.captures)


@pytest.mark.parametrize("name", CASES)
def test_change_is_followed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]()
    trained = Trained(scaled_step(next(case)))
    first = trained()
    for _ in range(2):
        trained.check()
    assert trained.captures == 1
    with caplog.at_level(logging.INFO, logger="graphopt"):
        next(case, None)
        changed = trained()
    trained.check()
    next(case, None)
    assert not torch.equal(changed, first)
    assert trained.captures == 2
    assert "read at " in caplog.text, caplog.text
