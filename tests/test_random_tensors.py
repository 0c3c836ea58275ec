"""Random steps over tensors that share memory do what eager code does, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphopt
from random_tensors import Model, State, shown, source
from test_random_steps import agrees

CALLS = 5


def run(module: ModuleType, compiled: bool) -> tuple[list[Any], str]:
    """What each call leaves, and the class of the error that ends it, if one does."""
    torch.manual_seed(0)
    s, m = State(), Model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step, closed_over = module.make(s, m, optimizer)
    given = (s, m)[: 2 - closed_over]
    step = graphopt.compile(step, pipeline="none") if compiled else step
    found: list[Any] = []
    for i in range(CALLS):
        x = torch.randn(3, 3)
        try:
            found.append(shown(s, m, x, step(x, i, *given)))
            module.between(s, m, i)
            found.append(shown(s, m, x, None))
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def check(seed: int, folder: Path) -> bool:
    """Whether it was captured."""
    return agrees(source(seed), folder, run)


def test_few_random_tensors(tmp_path: Path) -> None:
    captured = [check(seed, tmp_path) for seed in range(4)]
    assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_random_tensors(number: int, seed: int, tmp_path: Path) -> None:
    first = 1_000_000 + 1_000 * seed + 10 * number
    captured = [check(each, tmp_path) for each in range(first, first + 10)]
    assert any(captured)
