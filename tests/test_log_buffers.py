"""Dictionaries of lists that a step fills, computes of, and empties every so many calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt


class Buffer:
    """As a runner of hooks keeps what it logs."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.values, self.counts, self.output, self.ready = make(), make(), make(), False

    def update(self, values: dict[str, float], count: int) -> None:
        for key, value in values.items():
            if key not in self.values:
                self.values[key], self.counts[key] = [], []
            self.values[key].append(value)
            self.counts[key].append(count)

    def average(self, last: int) -> None:
        for key in self.values:
            values, counts = np.array(self.values[key][-last:]), np.array(self.counts[key][-last:])
            self.output[key] = np.sum(values * counts) / np.sum(counts)
        self.ready = True

    def clear(self) -> None:
        self.values.clear()
        self.counts.clear()
        self.output.clear()
        self.ready = False


def _left(make: Callable[[], Any], last: int, every: int, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    buffer, log, done = Buffer(make), list[Any](), [0]

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        buffer.update({"loss": loss.item(), "twice": 2 * loss.item()}, len(x))
        done[0] += 1
        if done[0] % every == 0:
            buffer.average(last)
        if buffer.ready:
            log.append(dict(number=done[0], **buffer.output))
            buffer.clear()
        return loss.detach()

    run = graphopt.compile(step) if compiled else step
    found = []
    for _ in range(9):
        run(torch.rand(4, 3))
        found.append(str([log, dict(buffer.values), dict(buffer.counts), buffer.ready]))
    return found


@pytest.mark.parametrize("make", [dict, OrderedDict])
@pytest.mark.parametrize(("last", "every"), [(2, 1), (2, 2), (3, 3), (0, 3)])
def test_a_buffer_that_is_emptied(make: Callable[[], Any], last: int, every: int) -> None:
    assert _left(make, last, every, True) == _left(make, last, every, False)


@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_a_list_is_computed_of_before_its_dictionary_is_emptied(make: Callable[[], Any]) -> None:
    """The graph was for one call, for which the dictionary was empty before it ran."""

    class Holder:
        table = make()

    def step(x: Tensor, log: list[float]) -> None:
        if "a" not in holder.table:
            holder.table["a"] = []
        holder.table["a"].append(x.sum().item())
        if len(holder.table["a"]) == 2:
            log.append(float(np.sum(np.array(holder.table["a"][-2:]))))
            holder.table.clear()

    holder, run = Holder(), graphopt.compile(step)
    holder.table = make()
    log: list[float] = []
    for number in range(6):
        run(torch.full((2,), float(number)), log)
    assert log == [2.0, 10.0, 18.0]
