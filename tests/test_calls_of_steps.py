"""Steps that call compiled steps, and calls that return early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool


def losses_of(rank: int, inner_compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def inner(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called: Any = graphopt.compile(inner) if inner_compiled else inner

    def outer(x: Tensor) -> Tensor:
        first: Tensor = called(x)
        return first + called(2 * x)

    step = graphopt.compile(outer)
    losses = [step(torch.full((3, 4), 1.0 + number + rank)) for number in range(4)]
    step.flush()
    assert called is inner or not called.captures
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def alike(rank: int) -> bool:
    return all(map(torch.equal, losses_of(rank, False), losses_of(rank, True)))


def test_in_one_process() -> None:
    assert alike(0)


def test_on_two_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(alike) == [True, True]


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
