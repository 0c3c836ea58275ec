"""Random steps over what stands outside them do what eager code does, or are refused."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphopt
from random_steps import Filled, Model, given_as, same_objects, shown, source

CALLS = 5


def loaded(text: str, folder: Path) -> ModuleType:
    """The module of a step, from a file: its lines are looked at."""
    path = folder / f"random_step_{zlib.crc32(text.encode())}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(seed: int, module: ModuleType, compiled: bool, capsys: Any) -> tuple[list[Any], str]:
    """What each call leaves, and the class of the error that ends it, if one does."""
    torch.manual_seed(0)
    model = Model()
    s: Any = model if given_as(seed) == "module" else Filled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = module.make(s)
    step = graphopt.compile(step, pipeline="none") if compiled else step
    found: list[Any] = []
    for i in range(CALLS):
        x, y = torch.randn(4, 3), torch.randint(3, (4,))
        try:
            given = s if given_as(seed) == "argument" else None
            returned = step(model, optimizer, x, y, i, given)
        except graphopt.CaptureError:
            return found, "CaptureError"
        except Exception as error:
            return found, type(error).__name__
        said = capsys.readouterr().out
        left = shown(returned), shown(s), same_objects(s), model.weight.tolist(), said
        found.append(left)
        if i == 2:
            s.rows, s.count = [9.0], 5
            s.texts.append("p")
        if i == 3:
            s.losses.append(3.25)
            s.array[1] = 4.0
            s.name, s.words[1] = "m", "other"
    return found, ""


def agrees(text: str, folder: Path, run: Callable[[ModuleType, bool], Any]) -> bool:
    """Whether a program is captured; it does then what eager code does. Each run has a module of
    its own, which it may change.

    Args:
        run: what each call leaves, and the class of the error that ends it; captured or not.
    """
    expected, ended = run(loaded(text, folder), False)
    found, refused = run(loaded(text, folder), True)
    assert found == expected[: len(found)], text
    if refused != "CaptureError":
        assert (len(found), refused) == (len(expected), ended), text
    return refused != "CaptureError"


def check(seed: int, folder: Path, capsys: Any) -> bool:
    """Whether it was captured."""
    return agrees(source(seed), folder, lambda *given: run(seed, *given, capsys))


@pytest.mark.parametrize("number", range(4))
def test_few_random_steps(number: int, tmp_path: Path, capsys: Any) -> None:
    seeds = range(10_000 + 3 * number, 10_003 + 3 * number)
    captured = [check(seed, tmp_path, capsys) for seed in seeds]
    assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_random_steps(number: int, seed: int, tmp_path: Path, capsys: Any) -> None:
    first = 1_000_000 + 1_000 * seed + 10 * number
    captured = [check(each, tmp_path, capsys) for each in range(first, first + 10)]
    assert any(captured)
