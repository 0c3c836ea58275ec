"""Arrays indexed by what only Python computes of tensors; lists of such values that are emptied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphopt

Metric = Callable[[Any, Any], Any]


def rates(s: Any, scores: Any) -> Any:
    """An equal error rate."""
    truth = np.eye(2, 4, dtype=int).flatten()
    order = np.argsort(-scores)
    found = np.cumsum(truth[order]) / truth.sum()
    wrong = np.cumsum(1 - truth[order]) / (1 - truth).sum()
    return wrong[np.argmin(np.abs(1.0 - found - wrong))]


def of_outside(s: Any, scores: Any) -> Any:
    best = np.argmax(scores) % 2
    return s.table[best], s.table[:, best], s.values[np.argsort(scores)].mean()


def by_truths(s: Any, scores: Any) -> Any:
    return s.values[scores > 0].sum()


def changed_between_two_reads(s: Any, scores: Any) -> Any:
    made, order = np.arange(8.0), np.argsort(scores)
    first = made[order]
    made[:] = 5
    return first, made[order]


def shows_and_clears(s: Any, scores: Any) -> Any:
    s.rows.append(scores.mean())
    s.rows.append(s.call)
    if len(s.rows) < 6:
        return None
    mean = np.mean(s.rows)
    s.rows.clear()
    return mean


def takes_the_first(s: Any, scores: Any) -> Any:
    s.rows.append(scores.mean())
    if len(s.rows) > 2:
        s.rows.pop(0)
    return np.mean(s.rows)


def turns(s: Any, scores: Any) -> Any:
    s.rows.append(scores.mean())
    s.rows.reverse()
    return np.mean(s.rows[:2])


METRICS: list[Metric] = [
    rates, of_outside, by_truths, changed_between_two_reads, shows_and_clears, takes_the_first,
    turns,
]  # fmt: skip


def _run(metric: Metric, compiled: bool, rows: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    s = SimpleNamespace(table=np.eye(2), values=np.arange(8.0), rows=rows, call=0)

    def step(x: torch.Tensor) -> Any:
        out = model(x)
        out.square().mean().backward()
        return metric(s, out.detach().numpy().flatten())

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for call in range(7):
        if call == 3:
            s.values = s.values + 1
        if call == 5:
            s.table[0] += 2
        found.append(repr((run(torch.randn(4, 3)), s.rows)))
    return found


@pytest.mark.parametrize("metric", METRICS)
def test_every_call_is_eager_s(metric: Metric) -> None:
    assert _run(metric, compiled=True, rows=[]) == _run(metric, compiled=False, rows=[])


def test_a_queue_is_cleared() -> None:
    found = [_run(shows_and_clears, compiled, deque()) for compiled in (False, True)]
    assert found[0] == found[1]
