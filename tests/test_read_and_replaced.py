"""An object that a step reads, and in whose place it puts another one: each call does so, where the
step has got to the first by that place alone; else it is refused, with the place."""

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
        self.first = self.statistics

    def update(self, loss: Tensor, number: int) -> None:
        self.statistics.loss += loss.item()
        if number % 2:
            self.statistics = self.made(loss)


MADE: dict[str, Callable[[Tensor], Statistics]] = {
    "a number": lambda loss: Statistics(loss.item()),
    "a tensor": lambda loss: Statistics(0.0, loss.detach()),
}


def _looped(made: Callable[[Tensor], Statistics], twice: bool = False) -> Callable[[], Loop]:
    def make() -> Loop:
        net, report = nn.Linear(4, 2), Report(made)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(number: int, x: Tensor) -> None:
            if twice:
                report.first.loss += 1.0
            report.update(trained(net, optimizer, x), number)

        def left() -> list[Any]:
            start, now = report.statistics.start, time.time()
            recent = isinstance(start, float) and now - 100 < start <= now
            return [net, report.statistics.loss, recent or start]

        return Loop(step, left)

    return make


@pytest.mark.parametrize("name", MADE)
def test_each_call_puts_its_own_there(name: str) -> None:
    graphs_of(_looped(MADE[name]))


@pytest.mark.parametrize("name", MADE)
def test_the_refusal_names_the_place(name: str) -> None:
    with pytest.raises(graphopt.CaptureError, match="statistics, and then puts a Stat") as refused:
        graphs_of(_looped(MADE[name], twice=True))
    assert "self.statistics = self.made(loss)" in str(refused.value)


def test_one_of_constants_is_replaced() -> None:
    graphs_of(_looped(lambda loss: Statistics()))
