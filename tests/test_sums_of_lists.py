"""Sums of lists that a step appends to, and that the program keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="sum() makes up for rounding errors, and is refused"
)

Effect = Callable[[Any, Tensor], Any]


def of_all(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    kept.mean = sum(kept.rows) / len(kept.rows)


def of_the_last(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    if len(kept.rows) > 2:
        kept.rows.pop(0)
    kept.mean = sum(kept.rows) / len(kept.rows)


def before_it_adds(kept: Any, loss: Tensor) -> Any:
    mean = sum(kept.rows) / max(len(kept.rows), 1)
    kept.rows += [loss.item(), 1]
    return mean


def always_taking(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    del kept.rows[0]
    kept.mean = sum(kept.rows)


def alike(kept: Any, loss: Tensor) -> None:
    of_all(kept, loss)
    kept.rows.reverse()


def run(effect: Effect, compiled: bool, between: Effect) -> tuple[list[Any], int]:
    torch.manual_seed(1)
    model, kept = nn.Linear(4, 1), SimpleNamespace(rows=[], mean=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found = effect(kept, loss)
        return loss.detach() if found is None else loss.detach() * found

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for index, x in enumerate(torch.randn(8, 5, 4)):
        found.append((used(x).item(), list(kept.rows), kept.mean, type(kept.mean)))
        between(kept, torch.tensor(index))
    return found, len(used.captures) if compiled else 0


def nothing(kept: Any, index: Tensor) -> None:
    pass


def cleared(kept: Any, index: Tensor) -> None:
    if index.item() == 3:
        kept.rows.clear()


def another_list(kept: Any, index: Tensor) -> None:
    if index.item() == 3:
        kept.rows = [0.5, 2]


def other_values(kept: Any, index: Tensor) -> None:
    kept.rows[:] = [1e16, 1, 2.5, index.item()][: index.item() + 1]


PAIRS = [
    (of_all, cleared),
    (of_the_last, nothing),
    (of_the_last, other_values),
    (of_the_last, another_list),
    (before_it_adds, nothing),
    (always_taking, other_values),
    (alike, nothing),
]


@pytest.mark.parametrize(("effect", "between"), PAIRS)
def test_a_sum_is_that_of_the_call(effect: Effect, between: Effect) -> None:
    expected, _ = run(effect, False, between)
    found, captures = run(effect, True, between)
    assert found == expected
    assert captures <= (4 if between is nothing else 7)


def test_a_list_that_is_used_otherwise_is_refused() -> None:
    def adds(kept: Any, loss: Tensor) -> None:
        of_all(kept, loss)
        kept.first = kept.rows[0]

    with pytest.raises(CaptureError, match="outside"):
        run(adds, True, nothing)
