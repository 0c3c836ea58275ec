"""docs/step.md tells the truth: its example runs; each row of its table is refused and cured."""

from __future__ import annotations

import logging
import random
import re
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import graphopt

PAGE = (Path(__file__).parent.parent / "docs" / "step.md").read_text()
CODE = re.compile(r"`([^`]+)`")
STEP = """
def step(x, scale=1.0):
    loss = model(x * scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {line}
    return loss.detach()
"""


def rows() -> list[tuple[str, list[str]]]:
    """The lines that are refused, each with what to write instead."""
    table = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    return [(CODE.findall(before)[0], CODE.findall(after)) for _, before, _, after, _ in table]


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "file").write_text("1.5")
    found: dict[str, Any] = {
        "history": [], "recent": deque(), "seen": set(), "table": {}, "kept": {},
        "logger": logging.getLogger("a step"), "path": tmp_path / "file", "model": model,
        "scales": iter([1.0, 2.0, 3.0]), "optimizer": optimizer, "x": torch.ones(3, 2),
        "scheduler": StepLR(optimizer, 2), "graphopt": graphopt, "torch": torch, "np": np,
        "warnings": warnings, "random": random, "time": time,
    }  # fmt: skip
    return found


def compiled(line: str, names: dict[str, Any]) -> Any:
    exec(STEP.format(line=line), names)
    return graphopt.compile(names["step"])


@pytest.mark.parametrize("number", range(len(rows())))
@pytest.mark.filterwarnings("ignore:diverged", "ignore:Detected call of")
def test_each_row_is_refused_and_cured(number: int, names: dict[str, Any]) -> None:
    line, cures = rows()[number]
    first = line.split("graphopt")[0]
    assert cures and not first.startswith("graphopt")
    with pytest.raises(graphopt.CaptureError, match="hint:"):
        compiled(line, names)(names["x"])
    for cure in (each for each in cures if each != "step"):
        if "step(x" in cure:
            names["step"] = compiled("pass", names)
            exec(cure, names)
            exec(cure, names)
        elif "graphopt.callback" in cure or "=" in cure:
            step = compiled(cure, names)
            step(names["x"]), step(names["x"])


def test_the_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    left = []
    for wrap in (lambda function: function, graphopt.compile):
        torch.manual_seed(0)
        names: dict[str, Any] = {"F": F}
        exec(code, names)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        trainer = names["Trainer"](model, torch.optim.SGD(model.parameters(), lr=0.1))
        train = wrap(trainer.train)
        losses = [train(torch.randn(4, 2), torch.randn(4, 1)).item() for _ in range(4)]
        left.append([losses, trainer.steps, trainer.ema, trainer.logs["loss"].item()])
        left[-1].append(trainer.hidden.tolist())
    assert left[0] == left[1]


def test_the_readme_leads_to_the_page() -> None:
    assert "docs/step.md" in (Path(__file__).parent.parent / "README.md").read_text()
