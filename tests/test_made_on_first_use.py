"""Lists, dictionaries and counts that a step makes on first use, or puts in the place of others."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt


def _state() -> SimpleNamespace:
    return SimpleNamespace(
        rows=[], queue=deque(maxlen=3), table={}, lists=defaultdict(list), counts=Counter(),
        found=None, history=[],
    )  # fmt: skip


def _std(out: Tensor) -> Any:
    return np.std(out.detach().numpy())


def shown_and_replaced(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.rows.append(loss.item())
    if i % 3 == 0:
        print(f"{np.mean(s.rows):.4f}")
        s.rows = []


def kept_and_replaced(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.rows.append(loss.item())
    if i % 3 == 0:
        s.history.append(s.rows)
        s.rows = []


def queue_replaced(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.queue.append(loss.item())
    print(np.mean(s.queue))
    if i % 4 == 3:
        s.queue = deque(maxlen=3)


def list_of_numpy(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    for name, metric in (("std", np.std), ("mean", np.mean)):
        if name not in s.table:
            s.table[name] = []
        s.table[name].append(metric(out.detach().numpy().astype("float64")))


def set_by_default(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.table.setdefault("std", []).append(_std(out))
    s.lists["std"].append(_std(out))
    print(np.mean(s.lists["std"]), len(s.table["std"]))


def tried(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    try:
        s.table["std"].append(_std(out))
    except KeyError:
        s.table["std"] = [_std(out)]


def none_at_first(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    if s.found is None:
        s.found = [f"first {loss.item():.3f}"]
    s.found.append(f"{loss.item():.3f}")


def nested(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    phase = "train" if i % 2 else "val"
    if phase not in s.table:
        s.table[phase] = {"std": [], "n": 0}
    s.table[phase]["std"].append(_std(out))
    s.table[phase]["n"] += len(out)


def counted(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.counts["n"] += 1
    s.table["n"] = s.table.get("n", 0) + 1
    s.table["loss"] = s.table.get("loss", 0.0) + loss.item()
    s.table["std"] = s.table.get("std", 0) + _std(out)
    s.table["best"] = max(s.table.get("best", -1.0), _std(out))


def taken_out(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.table["std"] = s.table.pop("std", 0) + _std(out)


STEPS: list[Callable[..., None]] = [
    shown_and_replaced, kept_and_replaced, queue_replaced, list_of_numpy, set_by_default, tried,
    none_at_first, nested, counted, taken_out,
]  # fmt: skip


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


def test_a_variable_of_a_closure() -> None:
    """As siamese-triplet's: `losses = []` behind the line that shows their mean."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, losses, rows = nn.Linear(3, 2), list[float](), []

        def step(i: int, x: Tensor, model: nn.Module = model) -> Any:
            nonlocal losses
            losses.append(model(x).sum().item())
            if i % 3:
                return None
            mean, losses = np.mean(losses), []
            return mean

        run: Any = graphopt.compile(step) if compiled else step
        for i in range(8):
            rows.append((run(i, torch.randn(4, 3)), list(losses)))
        found.append(rows)
    assert found[0] == found[1]


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "get": lambda d: d.get("sum", 0),
    "get of the class": lambda d: dict.get(d, "sum"),
    "getitem": lambda d: d.__getitem__("sum"),
    "operator": lambda d: operator.getitem(d, "sum"),
    "copy": lambda d: d.copy()["sum"],
    "values": lambda d: next(iter(d.values())),
}


@pytest.mark.parametrize("read", READERS)
def test_a_sum_of_numpy_is_that_of_each_call(read: str) -> None:
    """Read by methods and functions, it was the one of the capture ever after."""

    def adds(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
        s.table["sum"] = READERS[read](s.table) + _std(out)

    found = []
    for compiled in (False, True):
        state = _state()
        state.table["sum"] = np.float32(0)
        found.append(_run(adds, compiled, state))
    assert found[0] == found[1]
