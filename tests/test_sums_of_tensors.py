"""Sums of tensors that begin with a number: later calls add to a tensor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Adding = Callable[[SimpleNamespace, Tensor], Any]
ADDING: dict[str, Adding] = {}


def adding(function: Adding) -> Adding:
    ADDING[function.__name__] = function
    return function


@adding
def in_an_attribute(log: SimpleNamespace, loss: Tensor) -> None:
    log.total += loss


@adding
def written_out(log: SimpleNamespace, loss: Tensor) -> None:
    log.total = log.total * 0.5 + loss


@adding
def in_an_item(log: SimpleNamespace, loss: Tensor) -> None:
    log.sums["a"] += loss


@adding
def by_get(log: SimpleNamespace, loss: Tensor) -> None:
    log.sums["b"] = log.sums.get("b", 0) + loss


@adding
def in_a_meter(log: SimpleNamespace, loss: Tensor) -> None:
    """As the average meters of published training loops do."""
    log.total += loss * 4
    log.count += 4
    log.average = log.total / log.count


@adding
def that_is_compared(log: SimpleNamespace, loss: Tensor) -> None:
    log.total = loss if log.count == 0 else log.total * 0.9 + loss * 0.1
    log.count += 1


class Net(nn.Module):
    """Adds up in its forward.

    Attributes:
        total: of what it has computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.total = nn.Linear(4, 1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.total += y.detach().mean()  # type: ignore[assignment]
        return y


def run(add: Adding, compiled: bool, resets: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    net = Net()
    log = SimpleNamespace(total=0, count=0, average=0.0, sums={"a": 0.0})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        add(log, loss.detach())
        optimizer.step()
        return loss.detach()

    used = graphopt.compile(step) if compiled else step
    found = []
    for call, batch in enumerate(torch.randn(7, 5, 4)):
        if resets and call in (3, 4):
            net.total, log.total, log.count, log.sums = 0.0, 0, 0, {"a": 0.0}
        loss = used(batch)
        left = [loss, net.total, log.total, log.count, log.average, *log.sums.values()]
        found.append([(type(value).__name__, float(value)) for value in left])
    return found, used


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("name", ADDING)
def test_a_sum_that_begins_with_a_number(name: str, resets: bool) -> None:
    expected, _ = run(ADDING[name], compiled=False, resets=resets)
    found, step = run(ADDING[name], compiled=True, resets=resets)
    assert found == expected
    if not resets:
        assert len(step.captures) <= 2
