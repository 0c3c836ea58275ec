"""Random steps do what eager code does, or are refused: over what stands outside them, what changes
there between calls, containers among their arguments, tensors that share memory, trainings, and
what modules and autograd offer."""

from __future__ import annotations

import copy
import importlib.util
import io
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from contextvars import copy_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import graphopt
import random_arguments
import random_changes
import random_features
import random_steps
import random_tensors
import random_trainings
import random_writes

Found = tuple[list[Any], str]
"""What each call leaves, and the class of the error that ends it, if one does."""


def compiled_if(compiled: bool, step: Any) -> Any:
    return graphopt.compile(step, pipeline="none") if compiled else step


def outside(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    model = random_steps.Model()
    way = random_steps.given_as(seed)
    s: Any = model if way == "module" else random_steps.Filled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled_if(compiled, module.make(s))
    found: list[Any] = []
    for i in range(5):
        x, y = torch.randn(4, 3), torch.randint(3, (4,))
        with redirect_stdout(io.StringIO()) as said:
            try:
                returned = step(model, optimizer, x, y, i, s if way == "argument" else None)
            except Exception as error:
                return found, type(error).__name__
        shown, same = random_steps.shown, random_steps.same_objects
        weight = model.weight.tolist()
        found.append((shown(returned), shown(s), same(s), weight, said.getvalue()))
        if i == 2:
            s.rows, s.count = [9.0], 5
            s.texts.append("p")
        if i == 3:
            s.losses.append(3.25)
            s.array[1] = 4.0
            s.name, s.words[1] = "m", "other"
    return found, ""


def arguments(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    made = random_arguments
    s, m, b, o = made.State(), made.Model(), made.batch(), made.Batch()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step = compiled_if(compiled, module.make(s, m, optimizer))
    found: list[Any] = []
    for i in range(5):
        b = made.batch() if "b" in module.ANEW else b
        o = made.Batch() if "o" in module.ANEW else o
        x = torch.randn(3)
        try:
            found.append(made.shown(step(x, i, b, o), b, o, s, m, x))
            module.between(i, b, o, s, m)
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def tensors(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    s, m = random_tensors.State(), random_tensors.Model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    step, closed_over = module.make(s, m, optimizer)
    given, step = (s, m)[: 2 - closed_over], compiled_if(compiled, step)
    found: list[Any] = []
    for i in range(5):
        x = torch.randn(3, 3)
        try:
            found.append(random_tensors.shown(s, m, x, step(x, i, *given)))
            module.between(s, m, i)
            found.append(random_tensors.shown(s, m, x, None))
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def trainings(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    made = random_trainings
    model = made.Model()
    average, s = copy.deepcopy(model), made.State(model)
    optimizer, scheduler, step = module.make(model, average, s)
    step = compiled_if(compiled, step)
    found: list[Any] = []
    for i in range(6):
        x = torch.randn(s.rows, 3, generator=torch.Generator().manual_seed(i))
        try:
            returned = step(model, optimizer, x, i)
            left = made.left(model, average, optimizer, scheduler, s)
            found.append((made.shown(returned), left))
            module.between(model, average, optimizer, scheduler, s, i)
        except Exception as error:
            return found, type(error).__name__
    return found, ""


def changes(seed: int, module: ModuleType, compiled: bool) -> Found:
    return copy_context().run(_changes, module, compiled)


def _changes(module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    for parameter in module.model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    step = compiled_if(compiled, module.step)
    found: list[Any] = []
    for i in range(6):
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


def writes(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    model, s = random_writes.Model(), random_writes.state()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    module.OUT["held"].append(s)
    step = compiled_if(compiled, module.step)
    found: list[Any] = []
    for i in range(4):
        try:
            returned = step(model, optimizer, torch.randn(4, 3) + i, s)
        except Exception as error:
            return found, type(error).__name__
        attributes = [vars(model).get(name) for name in random_writes.ATTRIBUTES]
        left = [returned, s, module.OUT, *attributes, vars(optimizer).get("mark")]
        found.append(random_writes.shown([*left, *model.parameters()]))
        try:
            module.between(i, s, model)
        except Exception as error:
            return found, f"between: {type(error).__name__}"
    return found, ""


def features(seed: int, module: ModuleType, compiled: bool) -> Found:
    torch.manual_seed(0)
    model, rows = random_features.Model(), [4]
    other, optimizer = copy.deepcopy(model), module.make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    step = compiled_if(compiled, module.step)
    found: list[Any] = []
    for i in range(4):
        drawn = torch.Generator().manual_seed(i)
        x = torch.randn(rows[0], random_features.SIZE, generator=drawn)
        y, words = (torch.randint(most, (rows[0],), generator=drawn) for most in (6, 10))
        try:
            returned = step(model, optimizer, other, scaler, x, y, words, i)
            left = random_features.left(model, other, optimizer, scaler)
            found.append(random_features.bits([returned, x.grad, *left]))
            module.between(model, optimizer, i, rows)
        except Exception as error:
            return found, type(error).__name__
    return found, ""


class Kind(NamedTuple):
    """Programs of one kind: `source` writes one, `run` says what it leaves."""

    source: Callable[[int], str]
    run: Callable[[int, ModuleType, bool], Found]
    few: range


KINDS = {
    "outside": Kind(random_steps.source, outside, range(10_000, 10_004)),
    "arguments": Kind(random_arguments.source, arguments, range(4)),
    "tensors": Kind(random_tensors.source, tensors, range(4)),
    "trainings": Kind(random_trainings.source, trainings, range(3)),
    "changes": Kind(random_changes.source, changes, range(3)),
    "writes": Kind(random_writes.source, writes, range(6)),
    "features": Kind(random_features.source, features, range(6)),
}


def loaded(text: str, folder: Path) -> ModuleType:
    """The module of a step, from a file: its lines are looked at."""
    path = folder / f"random_step_{zlib.crc32(text.encode())}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_captured(kind: Kind, seed: int, folder: Path) -> bool:
    """Whether a program is captured; it does then what eager code does. Each run has a module of
    its own, which it may change."""
    text = kind.source(seed)
    expected, ended = kind.run(seed, loaded(text, folder), False)
    found, refused = kind.run(seed, loaded(text, folder), True)
    assert found == expected[: len(found)], text
    if refused != "CaptureError":
        assert (len(found), refused) == (len(expected), ended), text
    return refused != "CaptureError"


def test_few_random_steps(tmp_path: Path) -> None:
    for kind in KINDS.values():
        captured = [is_captured(kind, seed, tmp_path) for seed in kind.few]
        assert any(captured)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", KINDS)
def test_random_steps(name: str, number: int, seed: int, tmp_path: Path) -> None:
    first = 1_000_000 + 1_000 * seed + 10 * number
    captured = [is_captured(KINDS[name], each, tmp_path) for each in range(first, first + 10)]
    assert any(captured)
