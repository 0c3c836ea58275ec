"""Numbers in variables of the function around a step that a loop changes (`for i in range(n)`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Loop = Callable[[nn.Module, Any, Callable[[Any], Any]], tuple[list[float], Any]]


def rate(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    def rate_at(number: int) -> float:
        return 0.1 * (1 + number) / (2 + number)

    @wrap
    def step(x: Tensor) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for number in range(9):  # noqa: B007 - read by the step
        losses.append(step(torch.ones(2, 3)))
    return losses, step


def factor(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> Any:
    share = 0.0

    @wrap
    def step(x: Tensor) -> float:
        loss = model(x).square().mean() * share
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for number in range(9):
        share = number / 8
        losses.append(step(torch.ones(2, 3)))
    return losses, step


def windows(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> Any:
    rows = torch.randn(24, 3)
    shown: list[str] = []

    @wrap
    def step() -> float:
        weight = 0.5 if (epoch + 1) % 3 == 0 else 1.0
        loss = model(rows[batch * 8 : (batch + 1) * 8]).square().mean() * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown.append(f"epoch {epoch} batch {batch} loss {loss.item():.4f}")
        return loss.item()

    losses = []
    for epoch in range(5):  # noqa: B007 - read by the step
        for batch in range(3):  # noqa: B007
            losses.append(step())
    return [*losses, *shown], step


@pytest.mark.parametrize(("loop", "graphs"), [(rate, 3), (factor, 3), (windows, 8)])
def test_few_graphs_serve_all_numbers(loop: Loop, graphs: int) -> None:
    found = []
    for wrap in (lambda step: step, graphopt.compile):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results, step = loop(model, optimizer, wrap)
        found.append((results, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1]
    assert len(step.captures) <= graphs
