"""Numbers that are known before a call: arguments, and what optimizers count in, against eager."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable
from math import cos, floor
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt

NAMES = {0: 0.5, 1: 0.25, 2: 0.125}
WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
ARRAY = numpy.linspace(0.1, 1.0, 10)
SINGLE = ARRAY.astype(numpy.float32)
WHOLE = numpy.arange(10)
TABLE = numpy.arange(60.0).reshape(10, 6)
SIZES = [2, 2, 2, 3, 3, 3]
highest = max

# What a step does with an integer n and a tensor x, and how many graphs n = 0…5 need.
USES: dict[str, tuple[Callable[[int, Tensor], Any], int]] = {
    "unused": (lambda n, x: x, 1),
    "factor": (lambda n, x: x * n, 1),
    "from the left": (lambda n, x: n * x - n, 1),
    "arithmetic": (lambda n, x: x * ((n + 1) / 7 - n**2 % 5 + -n // 2 + abs(n - 3)), 1),
    "math": (lambda n, x: x * math.cos(math.sqrt(n) * 0.1) + math.pow(n, 0.3), 1),
    "power": (lambda n, x: x * (1 - 0.9 ** (n + 1)), 1),
    "every second": (lambda n, x: x * 2 if n % 2 == 0 else x, 2),
    "warm-up": (lambda n, x: x * min(1.0, n / 3), 1),
    "largest": (lambda n, x: x * max([0.5, n / 4, math.sqrt(n)]) + max(2, n), 1),
    "threshold": (lambda n, x: x * 0.5 if n >= 4 else x, 2),
    "truth": (lambda n, x: x * 2 if n else x, 2),
    "class": (lambda n, x: x * n if isinstance(n, int) else x.fill_(0.0), 1),
    "range": (lambda n, x: sum((x * i for i in range(n)), x), 6),
    "index": (lambda n, x: x * WEIGHTS[n] * tuple(WEIGHTS)[n - 1], 1),
    "index by name": (lambda n, x: x * operator.getitem(WEIGHTS, n), 1),
    "index of an array": (lambda n, x: x * ARRAY[n] + float(SINGLE[n]) + int(WHOLE[n]), 1),
    "row of an array": (lambda n, x: x + torch.tensor(TABLE[n]).float(), 1),
    "index of a list of sizes": (lambda n, x: x[: SIZES[n]], 6),
    "key": (lambda n, x: x * NAMES.get(n, 1.0), 6),
    "size": (lambda n, x: torch.zeros(n + 1, 6).sum() + x, 6),
    "row": (lambda n, x: x[n % 5], 1),
    "slice": (lambda n, x: x[: n + 1].sum() + x, 6),
    "text": (lambda n, x: x * float(f"{n}.5"), 1),
    "of integers": (lambda n, x: (x > 0).long() * n, 6),
    "tensor": (lambda n, x: x * torch.tensor(n), 6),
    "full": (lambda n, x: x + torch.full_like(x, n), 1),
    "bits": (lambda n, x: x * ((n & 1) + (n >> 1) + (1 << n) + (n ^ 5) + (n | 8) + ~n), 1),
    "quotient and remainder": (lambda n, x: x * divmod(n, 4)[1] + divmod(9, n + 1)[0], 1),
    "rounded": (lambda n, x: x * (round(n * 0.37, 1) + round(n / 3) + int(n * 0.7)), 1),
    "modulus": (lambda n, x: x * pow(n, 2, 5), 6),
    "imported by name": (lambda n, x: x * cos(n) + floor(n / 2) + highest(n, 3), 1),
    "further functions": (lambda n, x: x * math.atan2(n, 2) + math.gcd(n, 4) + math.isqrt(n), 1),
    "scalars of numpy": (lambda n, x: x * numpy.cos(n) + float(numpy.sqrt(n)) + 0.5 * ARRAY[n], 6),
    "divided by numpy's": (lambda n, x: x * (n / ARRAY[n]) + ARRAY[n] / 3, 1),
    "number of numpy's returned": (lambda n, x: [x.sum() * n, ARRAY[n] * n], 1),
    "sorted": (lambda n, x: x * sorted([n, 3])[0], 2),
    "returned": (lambda n, x: [x.sum() * n, n + 1], 1),
    "type": (lambda n, x: x * (2 if type(n) is int else 3), 1),
    "bit length": (lambda n, x: x * n.bit_length(), 6),
    "fraction or integer": (lambda n, x: x * (3 if isinstance(2 ** (2 - n), int) else 5), 2),
    "division": (lambda n, x: x / (n + 1) + (n + 1) / (x + 10), 1),
}


def trained(use: Callable[[int, Tensor], Any], compiled: bool, numbers: list[Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, x: Tensor, n: Any) -> Any:
        used = use(n, model(x))
        value = used[0] if isinstance(used, list) else used
        loss = value.float().sum() + model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, used[1] if isinstance(used, list) else None

    run = graphopt.compile(step, verify="off") if compiled else step
    results = [run(model, optimizer, torch.randn(5, 6), n) for n in numbers]
    made = run._calls.captured if isinstance(run, graphopt.TrainStep) else 0
    return [(loss.clone(), type(n), n) for loss, n in results], model.weight.clone(), made


_ALWAYS = {"arithmetic", "math", "every second", "size", "type", "of integers", "returned"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in _ALWAYS else [pytest.mark.full]) for n in USES]
)
def test_an_integer_that_changes_in_each_call(name: str) -> None:
    use, graphs = USES[name]
    expected, weight, _ = trained(use, False, list(range(6)))
    got, same, made = trained(use, True, list(range(6)))
    for (a, *rest), (b, *others) in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert rest == others
    assert torch.equal(same, weight)
    assert made == graphs


@pytest.mark.parametrize("name", ["factor", "arithmetic", "math", "warm-up", "class"])
def test_other_kinds_of_numbers(name: str) -> None:
    use, _ = USES[name]
    numbers = [0.25, 1, True, 2**60, 3.5, 2, 0.0, -0.0]
    expected, weight, _ = trained(use, False, [abs(n) for n in numbers])
    got, same, _ = trained(use, True, [abs(n) for n in numbers])
    assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(got, expected, strict=True))
    assert torch.equal(same, weight)


class Counting(torch.optim.Optimizer):
    """Counts in its state and in its groups, and asks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["mean"] = state.get("mean", 1.0) * group["beta"] + 0.1 * state["n"]
                scale = math.sqrt(1 - group["beta"] ** state["n"]) / state["mean"]
                if group["calls"] > 4:
                    scale = scale / 2
                p.add_(p.grad, alpha=-group["lr"] * scale)


def counted(compiled: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = Counting(model.parameters())

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    run = graphopt.compile(step) if compiled else step
    losses = []
    for _ in range(8):
        losses.append(run(model, optimizer, torch.randn(5, 6)).clone())
        optimizer.param_groups[0]["lr"] *= 0.9
    made = run._calls.captured if isinstance(run, graphopt.TrainStep) else 0
    return losses, model.weight.detach().clone(), optimizer.state_dict(), made


def test_an_optimizer_that_counts_in_python_numbers() -> None:
    losses, weight, state, _ = counted(compiled=False)
    again, same, left, made = counted(compiled=True)
    assert all(map(torch.equal, losses, again))
    assert torch.equal(weight, same)
    assert left["param_groups"] == state["param_groups"]
    assert left["state"] == state["state"]
    assert type(left["state"][0]["n"]) is int
    assert made <= 4


def test_a_refused_step_leaves_counts_as_they_were() -> None:
    model = nn.Linear(6, 6)
    optimizer = Counting(model.parameters())

    @graphopt.compile
    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        open(os.devnull, "r+").close()

    with pytest.raises(graphopt.CaptureError, match="file"):
        step(model, optimizer, torch.randn(5, 6))
    assert not optimizer.state
    assert optimizer.param_groups[0]["calls"] == 0


@functools.cache
def halved(n: int) -> float:
    return n * 0.5


def test_numbers_of_a_trace_do_not_stay_in_caches() -> None:
    expected, weight, _ = trained(lambda n, x: x * halved(n), False, [2, 3, 2])
    halved.cache_clear()
    got, same, _ = trained(lambda n, x: x * halved(n), True, [2, 3, 2])
    assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(got, expected, strict=True))
    assert torch.equal(same, weight)
    assert [type(halved(n)) for n in (2, 3)] == [float, float]
