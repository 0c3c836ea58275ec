"""`float(tensor)` and `int(tensor)` in a step, against eager."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt


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


def trained(use: Use, compiled: bool) -> tuple[list[Any], int]:
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
    expected, _ = trained(use, compiled=False)
    actual, count = trained(use, compiled=True)
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
        return int((out.argmax(1)[mask] == 1).sum()) / int(mask.sum()), float(loss)

    run = graphopt.compile(step)
    for number in range(3):
        torch.manual_seed(number)
        x, mask = torch.randn(8, 3), torch.arange(8) > number
        assert run(x, mask) == step(x, mask)
