"""Lists, dictionaries and counts that a step makes on first use, or puts in the place of others."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


def _state() -> SimpleNamespace:
    return SimpleNamespace(
        rows=[], queue=deque(maxlen=3), table={}, lists=defaultdict(list), counts=Counter(),
        found=None, history=[],
    )  # fmt: skip


def nested(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    phase = "train" if i % 2 else "val"
    if phase not in s.table:
        s.table[phase] = {"n": 0}
    s.table[phase]["n"] += len(out)


def counted(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.counts["n"] += 1
    s.table["n"] = s.table.get("n", 0) + 1
    s.table["loss"] = s.table.get("loss", 0.0) + loss.item()
    s.table["std"] = s.table.get("std", 0) + out.std().item()
    s.table["best"] = max(s.table.get("best", -1.0), out.std().item())


def taken_out(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.table["std"] = s.table.pop("std", 0) + out.std().item()


STEPS: list[Callable[..., None]] = [nested, counted, taken_out]


def _run(effect: Callable[..., None], compiled: bool, state: Any = None) -> list[Any]:
    torch.manual_seed(0)
    model, s = nn.Linear(3, 2), state or _state()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        effect(s, i, loss, out)

    run: Any = graphopt.compile(step) if compiled else step
    rows = []
    for i in range(8):
        run(i, torch.randn(4, 3))
        rows.append(repr(vars(s)))
    return rows


@pytest.mark.parametrize("effect", STEPS)
def test_every_call_is_eager_s(
    effect: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    eager = _run(effect, compiled=False), capsys.readouterr().out
    assert eager == (_run(effect, compiled=True), capsys.readouterr().out)
