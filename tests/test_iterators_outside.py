"""Iterators outside a step: each call takes a value, and one that is refused takes none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

MODEL = nn.Linear(2, 1)


def by_next(batches: Iterator[Tensor]) -> Any:
    return MODEL(next(batches)).sum()


def by_a_loop(batches: Iterator[Tensor]) -> Any:
    for batch in batches:
        return MODEL(batch).sum()
    return None


def by_max(batches: Iterator[Tensor]) -> Any:
    return MODEL(max(batches, key=len)).sum()


def behind_a_callback(batches: Iterator[Tensor]) -> Any:
    graphopt.callback(print, "now")
    return MODEL(next(batches)).sum()


TAKING: list[Callable[[Any], Tensor]] = [
    next,
    lambda batches: batches.__next__(),
    lambda batches: type(batches).__next__(batches),
    lambda batches: batches.send(None),
]


@pytest.mark.parametrize("take", TAKING)
@pytest.mark.parametrize("is_generator", [False, True], ids=["iterator", "generator"])
def test_a_value_is_taken_for_each_call(take: Callable[[Any], Tensor], is_generator: bool) -> None:
    if take is TAKING[-1] and not is_generator:
        return
    values = [torch.rand(2) for _ in range(5)]
    batches = (each for each in values) if is_generator else iter(values)
    step = graphopt.compile(lambda: MODEL(take(batches)).sum())
    for value in values[:4]:
        assert torch.equal(step(), MODEL(value).sum())
    assert len(step.captures) == 1
    assert [*batches] == values[4:]


@pytest.mark.parametrize("step", [by_max, behind_a_callback])
@pytest.mark.parametrize("is_generator", [False, True], ids=["iterator", "generator"])
def test_nothing_is_taken_by_a_refused_capture(
    step: Callable[[Iterator[Tensor]], Any], is_generator: bool
) -> None:
    values = [torch.ones(2) * index for index in range(2)]
    batches = (each for each in values) if is_generator else iter(values)
    with pytest.raises(CaptureError, match=r"takes (values|a value) from .*iterator"):
        graphopt.compile(step)(batches)
    assert len(list(batches)) == 2


def test_a_step_that_runs_eagerly_gets_them_all() -> None:
    values = [torch.ones(2) * index for index in range(3)]
    batches = iter(values)
    step = graphopt.compile(by_a_loop, fallback="eager")
    for value in values:
        assert torch.equal(step(batches), MODEL(value).sum())


def test_where_a_step_may_run_eagerly_nothing_is_taken_for_it() -> None:
    values = [torch.ones(2) * index for index in range(3)]
    batches = iter(values)
    step = graphopt.compile(by_next, fallback="eager")
    for value in values:
        assert torch.equal(step(batches), MODEL(value).sum())
