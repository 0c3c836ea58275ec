"""Functions of the program's that a step calls as a whole, since what they do cannot be followed:
everything compared with eager calls."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError, GraphOptError
from loops import Loop, graphs_of, run, trained


class Row(list[Any]):
    """A list of the program's own class, which no trace follows into a table."""


class Means:
    """Running means by name, as loggers of diffusion models keep them."""

    def __init__(self) -> None:
        self.order = [Row(), Row()]
        self.values: Any = defaultdict(float)
        self.counts: Any = defaultdict(int)
        self.seen = 0

    def add(self, key: str, value: float) -> None:
        old, count = self.values[key], self.counts[key]
        self.values[key] = old * count / (count + 1) + value / (count + 1)
        self.counts[key] = count + 1
        self.order[int(value) % 2].append(key)
        self.seen += 1

    def add_all(self, **values: float) -> None:
        for key, value in values.items():
            self.add(f"{key}{int(value * 4) % 3}", value)


class Bins:
    """Lists and tables by the number of a bin, a window, and the largest so far."""

    def __init__(self) -> None:
        self.sums, self.rows = [0.0] * 5, {index: Row([0]) for index in range(5)}
        self.window: Any = deque(maxlen=3)

    def put(self, number: float, weight: float = 1.0) -> None:
        index = int(number * 100) % 5
        self.sums[index] += number * weight
        self.rows[index].append(number)
        while len(self.window) > 1 and self.window[0] > number:
            self.window.popleft()
        self.window.append(number)


class SumTree:
    """Priorities of a replay memory, whose inner nodes are sums."""

    def __init__(self, capacity: int = 4) -> None:
        self.tree, self.data = numpy.zeros(2 * capacity - 1), numpy.zeros(capacity, dtype=object)
        self.capacity, self.write = capacity, 0

    def add(self, error: float, sample: Any) -> None:
        self.data[self.write] = sample
        self.update(self.write + self.capacity - 1, (abs(error) + 0.01) ** 0.6)
        self.write = (self.write + 1) % self.capacity

    def update(self, index: int, priority: float) -> None:
        change = priority - self.tree[index]
        self.tree[index] = priority
        while index:
            index = (index - 1) // 2
            self.tree[index] += change


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def by_key() -> Loop:
    model, optimizer = model_and_optimizer()
    means = Means()

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        means.add("loss", loss.item())
        for each in x.detach().abs().mean(1).numpy():
            means.add(f"loss_q{int(4 * each)}", each)
        return loss

    return Loop(step, lambda: [model, dict(means.values), dict(means.counts), means.order])


def by_keywords() -> Loop:
    model, optimizer = model_and_optimizer()
    means = Means()

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        print("before", means.seen)
        means.add_all(loss=loss.item(), size=x.abs().mean().item())
        print(f"{loss.item():.4f}")
        return loss

    return Loop(step, lambda: [model, dict(means.values), means.seen])


def into_bins() -> Loop:
    model, optimizer = model_and_optimizer()
    bins = Bins()

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        for row in x.detach():
            bins.put(row.abs().sum().item(), weight=0.5)
        bins.put(loss.item())
        return loss

    return Loop(step, lambda: [model, bins.sums, bins.rows, list(bins.window)])


def into_a_tree() -> Loop:
    model, optimizer = model_and_optimizer()
    tree = SumTree()

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        tree.add(loss.item(), (number, "sample"))
        return loss

    return Loop(step, lambda: [model, tree.tree.tolist(), list(tree.data), tree.write])


def by_a_closure() -> Loop:
    model, optimizer = model_and_optimizer()
    table = {index: Row() for index in range(5)}
    order: list[str] = []

    def note(value: float, named: str = "value") -> None:
        table[int(value * 1000) % 5].append(value)
        order.append(f"{named} {len(table)}")

    def step(number: int, x: Tensor) -> Any:
        order.append("begin")
        loss = trained(model, optimizer, x)
        note(loss.item())
        note(x.max().item(), named="largest")
        return loss

    return Loop(step, lambda: [model, table, order])


def beside_what_the_step_counts() -> Loop:
    model, optimizer = model_and_optimizer()

    class Trainer:
        calls, seen = 0, 0

        def __init__(self) -> None:
            self.table = [Row(), Row()]

    state = Trainer()

    def note(value: float) -> None:
        state.table[int(value * 1000) % 2].append((state.calls, state.seen))
        state.seen += 1

    def step(number: int, x: Tensor) -> Any:
        state.calls += 1
        loss = trained(model, optimizer, x)
        note(loss.item())
        state.calls += 1
        return loss

    return Loop(step, lambda: [model, state.table, state.calls, state.seen])


def of_tensors() -> Loop:
    model, optimizer = model_and_optimizer()
    rows = {index: Row() for index in range(4)}

    def note(loss: Tensor, labels: Tensor) -> None:
        rows[int(labels[0])].append(loss * 2)

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        note(loss.detach(), x.argmax(1))
        return loss

    return Loop(step, lambda: [model, rows])


WHOLE: list[Callable[[], Loop]] = [
    by_key,
    by_keywords,
    into_bins,
    into_a_tree,
    by_a_closure,
    beside_what_the_step_counts,
    of_tensors,
]


@pytest.mark.parametrize("make", WHOLE, ids=lambda make: make.__name__)
def test_what_cannot_be_followed_is_called_as_a_whole(make: Callable[[], Loop]) -> None:
    assert graphs_of(make) <= 3


def test_meters_of_clock_values_go_on() -> None:
    model, optimizer = model_and_optimizer()

    class Profiler:
        def __init__(self) -> None:
            self.last, self.logs = time.perf_counter(), defaultdict(list)

        def tick(self, name: str) -> None:
            if len(self.logs[name]) >= 3:
                print(name, numpy.std(self.logs[name]) >= 0)
                self.logs[name].clear()
            self.logs[name].append(time.perf_counter() - self.last)
            self.last = time.perf_counter()

    profiler = Profiler()

    def step(x: Tensor) -> Tensor:
        profiler.tick("wait")
        loss = trained(model, optimizer, x)
        profiler.tick("update")
        return loss

    compiled = graphopt.compile(step)
    for number in range(1, 9):
        compiled(torch.randn(3, 4))
        assert {name: len(found) for name, found in profiler.logs.items()} == {
            "wait": (number - 1) % 3 + 1,
            "update": (number - 1) % 3 + 1,
        }
        assert all(0 <= each < 60 for found in profiler.logs.values() for each in found)


def reads_behind() -> Loop:
    model, optimizer = model_and_optimizer()
    bins = Bins()

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        bins.put(loss.item())
        return loss, bins.sums[0]

    return Loop(step, lambda: [model])


def noting(make: Callable[[Any, Any], Any]) -> Loop:
    """A step that gives its loss, and a sum over its batch, to a function which puts them into a
    list that only the graph knows."""
    model, optimizer = model_and_optimizer()
    rows = {0: Row(), 1: Row()}
    note, draw, behind = make(rows, model)

    def step(number: int, x: Tensor) -> Any:
        loss, row = trained(model, optimizer, x + draw()), x.sum(1)
        note(loss.item(), row)
        behind(row)
        return loss

    return Loop(step, lambda: [model])


def zero() -> float:
    return 0.0


def nothing(row: Tensor) -> None:
    pass


def uses_the_model() -> Loop:
    def make(rows: Any, model: Any) -> Any:
        def note(value: float, row: Tensor) -> None:
            rows[int(value * 1000) % 2].append(model.weight.sum().item())

        return note, zero, nothing

    return noting(make)


def draws() -> Loop:
    def make(rows: Any, model: Any) -> Any:
        def note(value: float, row: Tensor) -> None:
            rows[int(value * 1000) % 2].append(random.random())

        return note, random.random, nothing

    return noting(make)


def draws_in_another_function() -> Loop:
    def make(rows: Any, model: Any) -> Any:
        class Noise:
            @property
            def now(self) -> float:
                return torch.rand(1).item()

        noise = Noise()

        def note(value: float, row: Tensor) -> None:
            rows[int(value * 1000) % 2].append(noise.now)

        return note, zero, nothing

    return noting(make)


def is_given_what_changes() -> Loop:
    def make(rows: Any, model: Any) -> Any:
        def note(value: float, row: Tensor) -> None:
            rows[int(value * 1000) % 2].append(row)

        return note, zero, lambda row: row.mul_(2)

    return noting(make)


REFUSED = [reads_behind, uses_the_model, draws, draws_in_another_function, is_given_what_changes]


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_function_that_does_more_is_followed(make: Callable[[], Loop]) -> None:
    with pytest.raises(CaptureError, match="append"):
        run(make, 3, compiled=True)


def test_a_function_that_changes_what_it_is_given_ends_the_call() -> None:
    def make(rows: Any, model: Any) -> Any:
        def note(value: float, row: Tensor) -> None:
            row += 1
            rows[int(value * 1000) % 2].append(value)

        return note, zero, nothing

    with pytest.raises(GraphOptError, match="changes a tensor in place that it is given"):
        run(lambda: noting(make), 3, compiled=True)
