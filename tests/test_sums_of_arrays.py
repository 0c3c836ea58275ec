"""Arrays without dimensions, of which operators make numbers, in sums that a step keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


def mean(losses: list[Tensor]) -> Any:
    total: Any = 0.0
    for loss in losses:
        total += loss.data.cpu().numpy()
    total /= len(losses)
    return total


def weighted(losses: list[Tensor]) -> Any:
    total: Any = 0
    count = 0
    for loss in losses:
        total += loss.detach().numpy() * 8
        count += 8
    total /= count
    return f"{total:.5f}", float(total)


def in_table(losses: list[Tensor]) -> Any:
    table: dict[str, Any] = {"loss": 0.0}
    for loss in losses:
        table["loss"] += loss.detach().numpy()
    table["loss"] /= len(losses)
    return table["loss"]


def scaled(losses: list[Tensor]) -> Any:
    value = losses[0].detach().numpy() * 1
    kept = value
    value *= 2
    return value, kept, value - 1 > 0


def run(read: Callable[[list[Tensor]], Any], captured: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept: list[Any] = []

    def step(batches: list[Tensor]) -> None:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        kept.append(read(losses))

    call: Callable[..., Any] = graphopt.compile(step) if captured else step
    for _ in range(4):
        call([torch.randn(8, 6) for _ in range(3)])
    return kept


@pytest.mark.parametrize("read", [mean, weighted, in_table, scaled])
def test_as_eager(read: Callable[[list[Tensor]], Any]) -> None:
    assert repr(run(read, True)) == repr(run(read, False))
