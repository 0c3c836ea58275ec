"""An object that a step reads, and in whose place it puts another one: refused where that holds
what is another one in each call, with the place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from tests.loops import Loop, graphs_of, trained


class Statistics:
    """As OpenNMT's."""

    def __init__(self, loss: Any = 0.0, start: Any = 0.5) -> None:
        self.loss, self.start = loss, start


class Report:
    """Where a step keeps one."""

    def __init__(self, made: Callable[[Tensor], Statistics]) -> None:
        self.made, self.statistics = made, Statistics()

    def update(self, loss: Tensor, number: int) -> None:
        self.statistics.loss += loss.item()
        if number % 2:
            self.statistics = self.made(loss)


MADE: dict[str, Callable[[Tensor], Statistics]] = {
    "a time": lambda loss: Statistics(start=time.time()),
    "a number": lambda loss: Statistics(loss.item()),
    "a tensor": lambda loss: Statistics(0.0, loss.detach()),
}


def _looped(made: Callable[[Tensor], Statistics]) -> Callable[[], Loop]:
    def make() -> Loop:
        net, report = nn.Linear(4, 2), Report(made)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(number: int, x: Tensor) -> None:
            report.update(trained(net, optimizer, x), number)

        return Loop(step, lambda: [net, report.statistics.loss, report.statistics.start])

    return make


@pytest.mark.parametrize("name", MADE)
def test_the_refusal_names_the_place(name: str) -> None:
    with pytest.raises(graphopt.CaptureError, match="statistics, and then puts a Stat") as refused:
        graphs_of(_looped(MADE[name]))
    assert "self.statistics = self.made(loss)" in str(refused.value)


def test_one_of_constants_is_replaced() -> None:
    graphs_of(_looped(lambda loss: Statistics()))
