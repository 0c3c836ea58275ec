"""Random steps over containers among their arguments do what eager code does, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphopt
from random_arguments import Batch, Model, State, batch, shown, source
from test_random_steps import agrees

CALLS = 5


def run(module: ModuleType, compiled: bool) -> tuple[list[Any], str]:
    """What each call leaves, and the class of the error that ends it, if one does."""
    torch.manual_seed(0)
    s, m, b, o = State(), Model(), batch(), Batch()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step = module.make(s, m, optimizer)
    step = graphopt.compile(step, pipeline="none") if compiled else step
    found: list[Any] = []
    for i in range(CALLS):
        b = batch() if "b" in module.ANEW else b
        o = Batch() if "o" in module.ANEW else o
        x = torch.randn(3)
        try:
            found.append(shown(step(x, i, b, o), b, o, s, m, x))
            module.between(i, b, o, s, m)
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def check(seed: int, folder: Path) -> bool:
    """Whether it was captured."""
    return agrees(source(seed), folder, run)


def test_few_random_arguments(tmp_path: Path) -> None:
    captured = [check(seed, tmp_path) for seed in range(4)]
    assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_random_arguments(number: int, seed: int, tmp_path: Path) -> None:
    first = 1_000_000 + 1_000 * seed + 10 * number
    captured = [check(each, tmp_path) for each in range(first, first + 10)]
    assert any(captured)
