"""Random changes outside a step, between its calls, are followed or refused."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphopt
from random_changes import source
from test_random_steps import agrees

CALLS = 6


def run(module: ModuleType, compiled: bool) -> tuple[list[Any], str]:
    """What each call gives, and the class of the error that ends it, if one does."""
    return copy_context().run(_run, module, compiled)


def _run(module: ModuleType, compiled: bool) -> tuple[list[Any], str]:
    torch.manual_seed(0)
    for parameter in module.model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    step = graphopt.compile(module.step, pipeline="none") if compiled else module.step
    found: list[Any] = []
    for i in range(CALLS):
        x = torch.randn(2, 3)
        try:
            loss = step(x)
        except Exception as error:
            return found, type(error).__name__
        found.append(str([loss.item(), *(p.tolist() for p in module.model.parameters())]))
        try:
            module.between(i)
        except Exception as error:
            return found, f"between: {type(error).__name__}"
    return found, ""


def check(seed: int, folder: Path) -> bool:
    """Whether it is captured until it ends."""
    return agrees(source(seed), folder, run)


def test_few_random_changes(tmp_path: Path) -> None:
    captured = [check(seed, tmp_path) for seed in range(3)]
    assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_random_changes(number: int, seed: int, tmp_path: Path) -> None:
    first = 1_000_000 + 1_000 * seed + 10 * number
    captured = [check(each, tmp_path) for each in range(first, first + 10)]
    assert any(captured)
