"""Decisions by numbers that are read from tensors, also where these are infinite or NaN."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

INFINITE = float("inf")
SKIPS: dict[str, Callable[[float], Any]] = {
    "other than itself": lambda v: v != v,
    "not equal to itself": lambda v: not operator.eq(v, v),
    "not as large as itself": lambda v: not v >= v,
    "not as small as itself": lambda v: not v <= v,
    "a size below zero": lambda v: not abs(v) >= 0,
    "a square below zero": lambda v: not v * v >= 0,
    "not below infinity": lambda v: not v < INFINITE,
    "infinity": lambda v: v == INFINITE,
    "above the least infinity": lambda v: not v > -INFINITE,
    "in a tuple": lambda v: v in (INFINITE, 7.0),
    "equal to NaN": lambda v: v == math.nan,
    "a difference": lambda v: v - v != 0,
    "chained": lambda v: not -INFINITE < v < 1e30,
    "true at all": lambda v: not v,
    "math.isfinite": lambda v: not math.isfinite(v),
    "math.isnan": lambda v: math.isnan(v),
    "math.isinf": lambda v: math.isinf(v),
    "numpy.isfinite": lambda v: not np.isfinite(v),
    "numpy.isnan": lambda v: np.isnan(v),
    "numpy.isinf": lambda v: np.isinf(v),
    "the larger one": lambda v: max(v, 0.0) != v,
}
VALUES = (1.0, 2.0, math.nan, INFINITE, -INFINITE, 3.0, 0.0, 7.0, INFINITE, math.nan, 1.0)


def _left(skips: Callable[[float], Any], compiled: bool) -> list[str]:
    """What is left of a training that skips a step by the value of a number."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, shown: Tensor) -> Tensor | None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if skips(shown.item()):
            return None
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for number, value in enumerate(VALUES):
        x = torch.full((2, 3), 1.0 + number)
        found.append(repr((run(x, torch.tensor(value)), [p.tolist() for p in model.parameters()])))
    return found


@pytest.mark.parametrize("kind", SKIPS)
def test_every_call_is_eager_s(kind: str) -> None:
    assert _left(SKIPS[kind], compiled=True) == _left(SKIPS[kind], compiled=False)


def _by_setting(rate: float) -> bool:
    return math.isfinite(rate) and not math.isnan(rate)


def test_settings_are_known_before_a_call() -> None:
    """What is asked about a number among the arguments is a condition of the graph."""
    model = nn.Linear(3, 1)

    def step(x: Tensor, factor: float) -> Tensor:
        return model(x) * (factor if _by_setting(factor) else 0.0)

    run = graphopt.compile(step)
    for factor, captures in ((1.0, 1), (2.0, 1), (INFINITE, 2), (3.0, 2), (math.nan, 2)):
        x = torch.ones(2, 3)
        assert torch.equal(run(x, factor), step(x, factor).detach())
        assert len(run.captures) == captures
