"""`type(tensor)` and `tensor.__class__` in a step are what they are in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Log = Callable[[dict[str, Any], Any], None]


def compared(kept: dict[str, Any], value: Any) -> None:
    if type(value) == torch.Tensor:  # noqa: E721
        value = value.item()
    kept["sum"] += value


def identical(kept: dict[str, Any], value: Any) -> None:
    kept["sum"] += value.item() if type(value) is torch.Tensor else value


def one_of_several(kept: dict[str, Any], value: Any) -> None:
    kept["sum"] += value.item() if type(value) in (torch.Tensor, nn.Parameter) else value


def by_attribute(kept: dict[str, Any], value: Any) -> None:
    kept["sum"] += value.item() if value.__class__.__name__ == "Tensor" else value


@pytest.mark.parametrize("log", [compared, identical, one_of_several, by_attribute])
def test_a_meter_that_asks_for_the_class_keeps_numbers(log: Log) -> None:
    model, kept = nn.Linear(2, 1), {"sum": 0.0}

    @graphopt.compile
    def step(x: Tensor) -> None:
        log(kept, model(x).sum())

    expected = 0.0
    for index in range(3):
        x = torch.ones(2) * index
        step(x)
        expected += model(x).sum().item()
    assert type(kept["sum"]) is float
    assert kept["sum"] == expected
    assert len(step.captures) == 1


def test_each_tensor_is_of_the_class_that_it_has_in_eager_code() -> None:
    model, found = nn.Linear(2, 1), []

    def step(x: Tensor) -> Any:
        loss = model(x).sum()
        names = [type(each).__name__ for each in (x, loss, model.weight, model.weight * 2)]
        names += [model.weight.__class__.__name__, type(nn.Parameter(torch.ones(2))).__name__]
        found.append(" ".join(names))
        return loss * 2 if type(loss) is Tensor else loss

    x, compiled = torch.ones(2), graphopt.compile(step)
    expected = step(x)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert found == [found[0]] * 3
