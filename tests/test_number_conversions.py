"""`float`, `int`, `type` and `map` of values in a step, against eager."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from loops import Loop, graphs_of, trained


class Meter:
    """An average, as many loops keep one for an epoch."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += float(value) * n
        self.count += n


def averaged(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    meter = Meter()
    for _ in range(2):
        meter.update(loss, len(y))
    return meter.sum / meter.count


def of_many_kinds(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)
    return [[float(y.max().to(dtype)), float(loss.to(dtype))] for dtype in dtypes]


def in_comprehensions(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    return (
        [float(each) for each in out.mean(1)],
        {int(label): 1 for label in y[:0]},
        sum(float(each) for each in out[0]),
    )


def through_keywords(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    return float(*(loss,)), builtins.float(loss), int(*[y[0]])


def means_itself(loss: Tensor, out: Tensor, y: Tensor) -> Any:
    """`float` in all its other uses."""
    number = float(loss)
    return (
        number,
        torch.zeros(2, dtype=float),
        float is float,
        isinstance(number, float),
        isinstance(int(y[0]), (int, str)),
        isinstance(number, int),
        float("1.5"),
        float(3),
        float(out.shape[0]),
        float.fromhex("0x1p-2"),
        {float: 1}[float],
        issubclass(float, object),
        0.0,
        int("12", 8),
        int(2.7),
    )


Use = Callable[[Tensor, Tensor, Tensor], Any]


# What is done with a loss, an output of 5 by 3, and labels; how many graphs eight calls need.
USES: dict[str, tuple[Use, int]] = {
    "returned": (lambda loss, out, y: float(loss), 1),
    "added": (lambda loss, out, y: 0.0 + float(loss) * y.size(0), 1),
    "arithmetic": (lambda loss, out, y: math.sqrt(float(loss)) - abs(float(loss) - 1) ** 2, 1),
    "accuracy": (lambda loss, out, y: int((out.argmax(1) == y).sum()) / y.size(0), 1),
    "counted": (lambda loss, out, y: 2 * int((out > 0).sum()) + int(y[0]), 1),
    "averaged": (averaged, 1),
    "kinds": (of_many_kinds, 1),
    "comprehensions": (in_comprehensions, 1),
    "keywords": (through_keywords, 1),
    "itself": (means_itself, 1),
    "of item": (
        lambda loss, out, y: [float(loss.item()), float(y.max().item()), int(y[1].item())],
        1,
    ),
    "back into a tensor": (lambda loss, out, y: out * float(loss) + torch.tensor(float(loss)), 1),
    "decision": (lambda loss, out, y: out * 2 if float(out.sum()) > 0 else out, 2),
    "decision by an integer": (lambda loss, out, y: out * 2 if int(y[0]) > 0 else out, 2),
    "size": (lambda loss, out, y: torch.ones(int(y[0]) + 1), 3),
    "range": (lambda loss, out, y: [out * i for i in range(int(y[0]))], 3),
    "slice": (lambda loss, out, y: out[: int(y[0]) + 1], 3),
    "index": (lambda loss, out, y: [1.0, 2.0, 3.0][int(y[0])], 3),
    "factor of integers": (lambda loss, out, y: y * int(y[0]), 1),
    "factor of floats": (lambda loss, out, y: out * int(y[0]), 1),
    "boolean": (lambda loss, out, y: [int(y[0] > 1), float(y[0] > 1)], 1),
    "rate": (lambda loss, out, y: loss * 1.0, 1),
}


def trained_of_conversions(use: Use, compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return use(loss.detach(), out.detach(), y)

    run: Any = graphopt.compile(step, pipeline="none", verify="off") if compiled else step
    found = []
    for index in range(9):
        x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
        y[0] = index % 3
        found.append(run(model, optimizer, x, y))
    return found, len(run.captures) if compiled else 0


def assert_alike(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, (list, tuple)):
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other)
    else:
        assert actual == expected


@pytest.mark.parametrize("name", USES)
def test_conversions_give_what_eager_gives(name: str) -> None:
    use, graphs = USES[name]
    expected, _ = trained_of_conversions(use, compiled=False)
    actual, count = trained_of_conversions(use, compiled=True)
    assert_alike(actual, expected)
    assert count == graphs


def by_another_function(model: Any, x: Tensor) -> Any:
    return max([model(x).sum()], key=float)


def of_several(model: Any, x: Tensor) -> Any:
    return float(model(x))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (by_another_function, ("tensor.item()", "return max([model(x).sum()], key=float")),
        (of_several, ("of_several", "return float(model(x))")),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_refused(step: Callable[..., Any], words: tuple[str, str]) -> None:
    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step)(nn.Linear(6, 3), torch.ones(5, 6))
    assert words[1] in str(caught.value)
    if step is not of_several:
        assert words[0] in str(caught.value)


def test_nothing_stays_replaced() -> None:
    """Neither the name of the module nor the builtin, whatever the step raises."""
    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(by_another_function)(nn.Linear(6, 3), torch.ones(5, 6))
    assert builtins.float is float
    assert "float" not in globals()
    assert float(torch.tensor(0.5)) == 0.5


def test_a_quotient_of_counts_beside_sizes_that_depend_on_values() -> None:
    """The quotient is recorded when it is returned, behind all else."""
    model = nn.Linear(3, 2)

    def step(x: Tensor, mask: Tensor) -> Any:
        out = model(x)
        loss = out[mask].sum()
        loss.backward()
        return int((out.argmax(1)[mask] == 1).sum()) / int(mask.sum()), float(loss.detach())

    run = graphopt.compile(step)
    for number in range(3):
        torch.manual_seed(number)
        x, mask = torch.randn(8, 3), torch.arange(8) > number
        assert run(x, mask) == step(x, mask)


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


FunctionsGivenUse = Callable[[nn.Module, Tensor, Tensor, list[Any]], Any]


def floats(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    loss = loss.detach()
    total = sum(map(float, [loss, loss * 2]))
    return total, list(map(math.sqrt, [loss.item(), 2.0])), list(map(round, [loss.item()]))


def of_pairs(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    number = loss.item()
    largest = list(itertools.starmap(max, [(number, 0.3), (number, -1.0)]))
    return largest, functools.reduce(operator.add, [number, 1.0]), functools.reduce(max, largest)


def one_by_one(model: nn.Module, loss: Tensor, x: Tensor, kept: list[Any]) -> Any:
    found = map(float, [loss.detach()])
    first = next(found)
    return first, list(found), list(filter(None, [0, 1]))


@pytest.mark.parametrize("use", [floats, of_pairs, one_by_one])
def test_given_functions_give_what_eager_code_gives(use: FunctionsGivenUse) -> None:
    def make() -> Loop:
        model, kept = nn.Linear(4, 2), list[Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            return use(model, trained(model, optimizer, x), x, kept)

        return Loop(step, lambda: [model, list(kept)])

    assert graphs_of(make, 5) <= 6
