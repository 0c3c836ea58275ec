"""Items, by their number, of lists and queues that a step has added tensors to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Effect = Callable[[Any, Tensor], Any]


def appended(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss)
    return kept.rows[0] * 2


def extended(kept: Any, loss: Tensor) -> Any:
    kept.rows.extend([loss])
    return kept.rows[0] * 2


def added(kept: Any, loss: Tensor) -> Any:
    kept.rows += [loss]
    return kept.rows[0] * 2


def compared(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss)
    return loss * (2.0 if kept.rows[0] is loss else 3.0)


def at_the_end(kept: Any, loss: Tensor) -> Any:
    kept.rows.appendleft(loss)
    return kept.rows[-1] * 2


@pytest.mark.parametrize("effect", [appended, extended, added, compared, at_the_end])
def test_the_first_item_is_not_taken_for_the_one_appended(effect: Effect) -> None:
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        kept = SimpleNamespace(rows=deque() if effect is at_the_end else [])

        def step(x: Tensor) -> Any:
            return effect(kept, model(x).sum().detach())  # noqa: B023

        run = graphopt.compile(step) if compiled else step
        given: list[Tensor] = []
        found.append(given)
        try:
            for index in range(4):
                given.append(run(torch.ones(2) * index))
        except CaptureError:
            assert compiled
            assert len(given) < 2
    eager, mine = found
    assert all(map(torch.equal, mine, eager))


def of_a_list_begun(kept: Any, loss: Tensor) -> Any:
    kept.rows.clear()
    kept.rows.append(loss)
    return kept.rows[0] * 2


def in_front(kept: Any, loss: Tensor) -> Any:
    kept.rows.insert(0, loss)
    return kept.rows[0] * 2


def last(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss)
    return kept.rows[-1] * 2


@pytest.mark.parametrize("effect", [of_a_list_begun, in_front, last])
def test_an_item_that_each_call_puts_there_is_found_in_one_graph(effect: Effect) -> None:
    model, kept = nn.Linear(2, 1), SimpleNamespace(rows=[])

    def step(x: Tensor) -> Any:
        return effect(kept, model(x).sum().detach())

    compiled = graphopt.compile(step)
    for index in range(4):
        x = torch.ones(2) * index
        assert torch.equal(compiled(x), model(x).sum() * 2)
    assert len(compiled.captures) == 1
