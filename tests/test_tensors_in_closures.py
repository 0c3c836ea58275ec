"""Tensors in variables of closures (`nonlocal hidden`): found and replaced by each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Training = tuple[Callable[[Tensor], Any], Callable[[int], None], Callable[[], list[Any]]]


def averaging(model: nn.Module) -> Training:
    mean = torch.zeros(())

    def step(loss: Tensor) -> None:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss

    def between(call: int) -> None:
        nonlocal mean
        if call == 2:
            mean = torch.ones(2)

    return step, between, lambda: [mean]


def exchanging(model: nn.Module) -> Training:
    first, second = torch.zeros(()), torch.ones(())

    def step(loss: Tensor) -> Tensor:
        nonlocal first, second
        before, first, second = first, second, first + loss
        return before

    def between(call: int) -> None:
        nonlocal second
        if call == 2:
            second = first

    return step, between, lambda: [first, second]


def beginning(model: nn.Module) -> Training:
    hidden: Any = None

    def step(loss: Tensor) -> None:
        nonlocal hidden
        hidden = loss if hidden is None else hidden * loss

    def between(call: int) -> None:
        nonlocal hidden
        if call == 2:
            hidden = None
        elif call == 4:
            hidden = 2.0

    return step, between, lambda: [hidden]


def in_place(model: nn.Module) -> Training:
    mean = torch.zeros(())
    kept: list[Tensor] = []

    def change(value: Tensor) -> None:
        nonlocal mean
        kept.append(mean)
        mean = mean + value

    def step(loss: Tensor) -> Tensor:
        mean.mul_(0.9)
        change(loss)
        return mean

    return step, lambda call: None, lambda: [mean, *kept]


TRAININGS = {averaging: 2, exchanging: 2, beginning: 3, in_place: 1}


def run(make: Callable[[nn.Module], Training], compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, between, left = make(model)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), inner(loss.detach())

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for call, x in enumerate(torch.randn(6, 5, 4)):
        results = used(x)
        found.append([_plain(value) for value in (*results, *left())])
        between(call)
    return found, len(used.captures) if compiled else 0


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("make", TRAININGS)
def test_each_call_finds_the_tensor_of_the_last(make: Callable[[nn.Module], Training]) -> None:
    expected, _ = run(make, False)
    found, captures = run(make, True)
    assert found == expected
    assert captures <= TRAININGS[make]
