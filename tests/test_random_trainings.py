"""Random steps of training do what eager code does, or are refused, whatever the program does to
model and optimizer between their calls."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphopt
from random_trainings import Model, State, left, shown, source
from test_random_steps import agrees

CALLS = 6


def run(module: ModuleType, compiled: bool) -> tuple[list[Any], str]:
    """What each call leaves, and the class of the error that ends it, if one does."""
    torch.manual_seed(0)
    model = Model()
    average, s = copy.deepcopy(model), State(model)
    optimizer, scheduler, step = module.make(model, average, s)
    step = graphopt.compile(step, pipeline="none") if compiled else step
    found: list[Any] = []
    for i in range(CALLS):
        x = torch.randn(s.rows, 3, generator=torch.Generator().manual_seed(i))
        try:
            returned = step(model, optimizer, x, i)
            found.append((shown(returned), left(model, average, optimizer, scheduler, s)))
            module.between(model, average, optimizer, scheduler, s, i)
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def check(seed: int, folder: Path) -> bool:
    """Whether it was captured."""
    return agrees(source(seed), folder, run)


def test_few_random_trainings(tmp_path: Path) -> None:
    captured = [check(seed, tmp_path) for seed in range(3)]
    assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
def test_random_trainings(number: int, seed: int, tmp_path: Path) -> None:
    first = 1_000_000 + 1_000 * seed + 5 * number
    captured = [check(each, tmp_path) for each in range(first, first + 5)]
    assert any(captured)
