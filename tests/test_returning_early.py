"""Calls of a step that look at their batch and return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphopt


@pytest.mark.parametrize("first", [0, 2])
def test_a_batch_that_is_too_small(first: int) -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, s = nn.Linear(3, 2), SimpleNamespace(steps=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            x, y = torch.autograd.Variable(x).float(), torch.autograd.Variable(y).long()
            if len(x) != 4:
                return None
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            s.steps += 1
            return loss.item()

        called = graphopt.compile(step) if compiled else step
        said = []
        for index in range(5):
            n = 3 if index == first else 4
            said.append(called(torch.randn(n, 3).double(), torch.randint(0, 2, (n,)).int()))
        return said, s.steps, model.weight.tolist()

    assert run(False) == run(True)


def test_what_a_step_without_a_model_computes() -> None:
    @graphopt.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2 if x.sum() > 0 else x * 3

    for value in (1.0, -5.0, 2.0):
        x = torch.full((2,), value)
        assert step(x).tolist() == ([2 * (value + 1)] if value > 0 else [3 * (value + 1)]) * 2
        assert x.tolist() == [value + 1] * 2
