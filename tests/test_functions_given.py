"""Functions that a step gives to `map` and the like are called as by its own instructions."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of, trained

ROWS = numpy.random.RandomState(0).randn(20, 4).astype(numpy.float32)
TARGETS = numpy.random.RandomState(1).randn(20)

Use = Callable[[nn.Module, Tensor, Tensor, list[Any]], Any]


def drawn(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    """Stable Baselines: a batch of a buffer in arrays."""
    found = numpy.random.randint(0, 20, size=5)
    rows, targets = map(torch.tensor, (ROWS[found], TARGETS[found]))
    return (model(rows).mean(1) - targets).square().mean()


def drawn_by_partial(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    found = numpy.random.randint(0, 20, size=5)
    to_tensor = functools.partial(torch.tensor, dtype=torch.float32)
    rows, targets = map(to_tensor, (ROWS[found], TARGETS[found]))
    return (model(rows).mean(1) - targets).square().mean()


def gaussian(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    return loss * sum(map(random.gauss, [0, 1], [1, 2]))


def floats(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    kept.append(loss.item())
    loss = loss.detach()
    total = sum(map(float, [loss, loss * 2]))
    return total, sum(map(float, kept)) / len(kept), sorted(map(float, [loss * 2, loss]))


def texts(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    print(", ".join(map("{:.3f}".format, [loss.item(), 2.0])))
    return list(map(str, [loss.item(), 3])), list(map(str.upper, [f"{loss.item():.2f}a"]))


def of_pairs(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    number = loss.item()
    largest = list(itertools.starmap(max, [(number, 0.3), (number, -1.0)]))
    return largest, functools.reduce(operator.add, [number, 1.0]), functools.reduce(max, largest)


def one_by_one(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    found = map(float, [loss.detach()])
    first = next(found)
    return first, list(found), list(filter(None, [0, 1]))


def kept_by_append(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    list(map(kept.append, [loss.item(), "one"]))
    list(map(print, [loss.item()]))


def of_numpy(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    means = list(map(numpy.mean, [x.numpy(), loss.detach().numpy()]))
    return means, list(map(math.sqrt, [loss.item(), 2.0])), list(map(round, [loss.item()]))


@pytest.mark.parametrize(
    "use",
    [drawn, drawn_by_partial, gaussian, floats, texts, of_pairs, one_by_one, kept_by_append,
     of_numpy],
)  # fmt: skip
def test_given_functions_give_what_eager_code_gives(use: Use) -> None:
    def make() -> Loop:
        model, kept = nn.Linear(4, 2), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            return use(model, trained(model, optimizer, x), x, kept)

        return Loop(step, lambda: [model, list(kept)])

    assert graphs_of(make, 5) <= 6
