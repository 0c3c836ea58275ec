"""Tensors in lists that a step keeps, and changes in place elsewhere: they are the same ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of

Step = Callable[[Any, Any, Tensor], Any]


def changed_behind(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    h.mul_(2)


def one_that_stands_outside(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], s.beside]
    s.beside.add_(1)


def a_buffer(s: Any, model: Any, h: Tensor) -> None:
    s.rows = s.rows[-2:] + [model.buffer]  # noqa: RUF005
    model.buffer.add_(1)


def in_two_places(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = h


def summed_before(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = sum(s.rows)
    h.mul_(2)


def stacked_before_and_behind(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = torch.stack(s.rows).sum(0)
    h.mul_(2)
    s.last = s.last + torch.stack(s.rows).sum(0)


def items_before(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.beside, s.last = s.rows[0], s.rows[-1] * 1
    h.mul_(2)


def another_list_of_them(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    several = list(s.rows)
    h.mul_(2)
    s.last = several[-1]


def kept(step: Step) -> Loop:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("buffer", torch.randn(4))
    s = SimpleNamespace(rows=[torch.randn(4)], beside=torch.randn(4), last=torch.randn(4))

    def run(number: int, x: Tensor) -> Tensor:
        h: Tensor = model(x[0]).detach()
        step(s, model, h)
        return h

    def between(number: int) -> None:
        s.beside.add_(0.5)
        s.last.mul_(0.5)
        model.buffer.add_(1)

    return Loop(run, lambda: [s.rows, s.beside, s.last, model.buffer], between)


@pytest.mark.parametrize(
    "step",
    [
        changed_behind,
        one_that_stands_outside,
        a_buffer,
        in_two_places,
        summed_before,
        stacked_before_and_behind,
        items_before,
        another_list_of_them,
    ],
)
def test_every_call_is_eager_s(step: Step) -> None:
    graphs_of(lambda: kept(step), calls=5)
