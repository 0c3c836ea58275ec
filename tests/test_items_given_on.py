"""Containers within containers: gone through by `zip` and `enumerate`, compared, and returned."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Given:
    def __init__(self, rows: Any, loss: Any) -> None:
        self.rows, self.loss = rows, loss


def _reversed(s: Any, loss: Tensor) -> None:
    for table in reversed(s.tables):
        table["n"] = table.get("n", 0) + 1
        table["loss"] = loss.item()


def _read(s: Any, loss: Tensor) -> Any:
    return sum(index * sum(row) + len(row) for index, row in enumerate(s.seen))


GIVEN_ON: list[Callable[[Any, Tensor], Any]] = [_reversed, _read]
LOOKED_AT: dict[str, Callable[[Any, Tensor], Any]] = {
    "largest": lambda s, loss: max(row for row in s.seen),
    "largest of pairs": lambda s, loss: max((1, row) for row in s.seen),
    "sorted": lambda s, loss: sorted(row for _, row in enumerate(s.seen)),
    "zip sorted": lambda s, loss: sorted(zip([1, 1], s.seen, strict=True)),
    "any": lambda s, loss: any(row for row in s.seen),
    "returned in a list": lambda s, loss: [row for _, row in enumerate(s.seen)],
    "returned in a dictionary": lambda s, loss: {"a": {"b": s.seen}},
    "returned in an object": lambda s, loss: vars(Given(s.seen, 1)),
}


def _run(effect: Callable[[Any, Tensor], Any], compiled: bool) -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    s = SimpleNamespace(
        tables=[{}, {}], seen=[[], [3]],
    )  # fmt: skip

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return effect(s, loss)

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for call in range(6):
        if call in (2, 4):
            s.seen[1].append(call)
        returned = run(torch.randn(4, 3))
        found.append(repr((returned, s.tables)))
    return found, len(run.captures) if compiled else 0


@pytest.mark.parametrize("effect", GIVEN_ON)
def test_loops_see_what_they_use(effect: Callable[[Any, Tensor], Any]) -> None:
    expected, _ = _run(effect, compiled=False)
    found, graphs = _run(effect, compiled=True)
    assert found == expected
    assert graphs <= (3 if effect is _read else 2)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_is_looked_at_within(name: str) -> None:
    """Lists in lists that a generator expression gives, or that are returned, were those of the
    capture ever after."""
    assert _run(LOOKED_AT[name], compiled=True)[0] == _run(LOOKED_AT[name], compiled=False)[0]
