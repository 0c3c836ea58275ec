"""`type(value)` and `value.__class__` in a step are what they are in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of, trained

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
    model = nn.Linear(2, 1)

    def step(x: Tensor) -> Any:
        loss = model(x).sum()
        names = [type(each).__name__ for each in (x, loss, model.weight, model.weight * 2)]
        names += [model.weight.__class__.__name__, type(nn.Parameter(torch.ones(2))).__name__]
        return " ".join(names), loss * 2 if type(loss) is Tensor else loss

    x, compiled = torch.ones(2), graphopt.compile(step)
    names, expected = step(x)
    for _ in range(2):
        found = compiled(x)
        assert found[0] == names and torch.equal(found[1], expected)


def of_numbers(loss: Tensor, count: int, kept: list[Any], rate: float) -> Any:
    numbers = loss.item(), count, count / 2, (loss > 0).item(), (loss > 0).sum().item(), rate * 2
    names = [type(each).__name__ for each in numbers]
    names += [each.__class__.__name__ for each in numbers]
    return names, type(numbers[0])(3), type(numbers[0]) is type(numbers[2]), numbers[0] % 1


def has_attributes(loss: Tensor, count: int, kept: list[Any], rate: float) -> Any:
    values = loss.item(), count, loss
    names = "__iter__", "__len__", "item", "shape", "real", "nothing"
    return [[hasattr(each, name) for name in names] for each in values], list(map(callable, values))


@pytest.mark.parametrize("use", [of_numbers, has_attributes])
def test_each_number_is_of_the_class_that_it_has_in_eager_code(use: Callable[..., Any]) -> None:
    def make() -> Loop:
        model, kept = nn.Linear(4, 2), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            return use(loss, number, kept, optimizer.param_groups[0]["lr"])

        return Loop(step, lambda: [model, list(kept)])

    assert graphs_of(make, 6) <= 3


def test_an_argument_of_another_class() -> None:
    model = nn.Linear(2, 1)
    step = graphopt.compile(lambda number, x: (type(number).__name__, model(x) * number))
    for number in (1, 2.5, 3, np.float64(2.0), 4.5):
        assert step(number, torch.ones(2))[0] == type(number).__name__
