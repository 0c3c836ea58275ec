"""Contexts of torch that a program keeps and a step enters, beside decisions by value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import graphopt


class Trainer:
    def __init__(self, context: AbstractContextManager[Any]) -> None:
        torch.manual_seed(0)
        self.context = context
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.skipped = 0

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        with self.context:
            target = self.model(x).float()
        loss = (self.model(x) - target.detach()).square().sum() + target.sum()
        if loss.isnan() or not loss.requires_grad:
            self.skipped += 1
            return None
        if target.requires_grad:
            loss.backward()
            self.optimizer.step()
        return loss.item()


def _trained(make: Callable[[], Any], other: Callable[[], Any] | None, compiled: bool) -> list[Any]:
    trainer = Trainer(make())
    step = graphopt.compile(trainer.step) if compiled else trainer.step
    found: list[Any] = []
    for index in range(6):
        if index == 3 and other is not None:
            trainer.context = other()
        x = torch.full((2, 4), float("nan")) if index in (2, 4) else torch.randn(2, 4)
        result = step(x)
        found += [result, trainer.skipped, trainer.model.weight.tolist()]
        found += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        found += [vars(trainer.context).get("prev")]
    return found


_MADE: list[Callable[[], Any]] = [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.cpu.amp.autocast(),
    torch.no_grad,
    torch.enable_grad,
]


@pytest.mark.parametrize("number", range(len(_MADE)))
@pytest.mark.parametrize("other", [None, nullcontext, lambda: torch.autocast("cpu")])
@pytest.mark.filterwarnings("ignore:.*autocast.*is deprecated:FutureWarning")
def test_they_are_entered_in_each_call(number: int, other: Callable[[], Any] | None) -> None:
    results = [repr(_trained(_MADE[number], other, compiled)) for compiled in (False, True)]
    assert results[0] == results[1]
