"""Arrays of tensors that the graph gives, computed with what is drawn before it runs: noise that is
added to an action."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError


def shuffled_behind(array: Any) -> Any:
    order = numpy.arange(2)
    found = array + order
    numpy.random.shuffle(order)
    return found + order


USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda array: array + numpy.random.randn(2),
    "noise first": lambda array: numpy.random.randn(2) - array,
    "clipped": lambda array: numpy.clip(array + 0.1 * numpy.random.randn(2), -1, 1),
    "scalar of numpy": lambda array: array + numpy.random.randn(),
    "scalar before": lambda array: numpy.random.randn() * array,
    "single precision": lambda array: array + numpy.random.randn(2).astype(numpy.float32),
    "compared": lambda array: numpy.random.randn(2) > array,
    "of integers": lambda array: array + numpy.random.randint(0, 5, size=2),
    "masked": lambda array: array * (numpy.random.randn(2) > 0),
    "of Python": lambda array: array * random.random(),
    "chosen": lambda array: numpy.where(array > 0, array, numpy.random.randn(2)),
    "shuffled behind": shuffled_behind,
    "text": lambda array: f"{(array + numpy.random.randn(2))[0]:.3f}",
}


def described(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), repr(value)


def stepping(use: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[Any]:
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept: list[Any] = []

    @wrap
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
        with torch.no_grad():
            action = model(x).numpy()
        found = use(action)
        kept.append(found)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    found = [described(step(model, optimizer, torch.full((3,), 1.0 + i))) for i in range(4)]
    state = [model.weight.tolist(), numpy.random.get_state()[2], random.getstate()[1][-1]]
    return [*found, *map(described, kept), *state]


@pytest.mark.parametrize("use", USES)
def test_noise_is_that_of_each_call(use: str) -> None:
    assert stepping(USES[use], lambda step: step) == stepping(USES[use], graphopt.compile)


def in_place(array: Any) -> Any:
    array += numpy.random.randn(2)  # HERE
    return array


def test_in_place_says_what_to_write() -> None:
    with pytest.raises(CaptureError, match="x = x \\+ y") as caught:
        stepping(in_place, graphopt.compile)
    assert "# HERE" in str(caught.value)
