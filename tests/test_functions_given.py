"""Functions that a step gives to `map` and the like are called as by its own instructions."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of, trained

Use = Callable[[nn.Module, Tensor, Tensor, list[Any]], Any]


def floats(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    loss = loss.detach()
    total = sum(map(float, [loss, loss * 2]))
    return total, list(map(math.sqrt, [loss.item(), 2.0])), list(map(round, [loss.item()]))


def of_pairs(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    number = loss.item()
    largest = list(itertools.starmap(max, [(number, 0.3), (number, -1.0)]))
    return largest, functools.reduce(operator.add, [number, 1.0]), functools.reduce(max, largest)


def one_by_one(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    found = map(float, [loss.detach()])
    first = next(found)
    return first, list(found), list(filter(None, [0, 1]))


@pytest.mark.parametrize("use", [floats, of_pairs, one_by_one])
def test_given_functions_give_what_eager_code_gives(use: Use) -> None:
    def make() -> Loop:
        model, kept = nn.Linear(4, 2), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            return use(model, trained(model, optimizer, x), x, kept)

        return Loop(step, lambda: [model, list(kept)])

    assert graphs_of(make, 5) <= 6
