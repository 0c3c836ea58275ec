"""Clocks that a step reads: each call reads them anew, in one graph, where the program does."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool


class Meter:
    """As training scripts have it."""

    def __init__(self) -> None:
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, value: float, count: int = 1) -> None:
        self.val = value
        self.sum += value * count
        self.count += count
        self.avg = self.sum / self.count


def training(size: int = 4) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2 * size, size)

    def train() -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic_ns])
def test_a_meter_of_a_batch_s_time(clock: Callable[[], Any]) -> None:
    meter, train, end = Meter(), training(), clock()

    @graphopt.compile
    def step() -> Tensor:
        nonlocal end
        loss = train()
        meter.update(clock() - end)
        end = clock()
        return loss

    step()
    known = []
    for _ in range(3):
        before, old = clock(), end
        step()
        assert before <= end <= clock()
        assert 0 < meter.val <= end - old
        known.append(meter.val)
    assert len(set(known)) > 1
    assert meter.count == 4
    assert meter.avg == meter.sum / 4
    assert len(step.captures) == 1


def test_what_lies_between_two_readings_is_measured() -> None:
    train, found = training(256), []

    @graphopt.compile
    def step() -> None:
        start = time.perf_counter()
        first = time.perf_counter()
        train()
        found.append((first - start, time.perf_counter() - start))

    for _ in range(4):
        step()
    assert all(0 <= little < much for little, much in found[1:])


BEGAN = datetime.datetime.now()
TEXTS: dict[str, Callable[[float], Any]] = {
    "strftime": lambda began: time.strftime("%H:%M:%S"),
    "keyword of now": lambda began: datetime.datetime.now(tz=datetime.timezone.utc).isoformat(),
    "method of now": lambda began: datetime.datetime.now().strftime("%S.%f"),
    "now": lambda began: f"{datetime.datetime.now()}",
    "elapsed": lambda began: str(datetime.timedelta(seconds=time.time() - began)),
    "whole seconds": lambda began: f"{int(1000 * (time.time() - began))}",
    "fields": lambda began: f"{datetime.datetime.now().microsecond} {time.localtime().tm_year}",
    "difference": lambda began: (datetime.datetime.now() - BEGAN).total_seconds(),
    "ctime": lambda began: time.ctime() + str(time.time()),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_now(text: str) -> None:
    train, began = training(), time.time()
    shown: list[str] = []

    @graphopt.compile
    def step() -> None:
        train()
        shown.append(f"{TEXTS[text](began)}")

    for _ in range(3):
        step()
        time.sleep(1.05 if text == "strftime" else 0.002)
    assert len(set(shown)) == 3
    assert len(step.captures) == 1
    eager = f"{TEXTS[text](began)}"
    assert [each.isdigit() for each in eager[:2]] == [each.isdigit() for each in shown[-1][:2]]


def test_a_date_of_today() -> None:
    train, kept = training(), []

    @graphopt.compile
    def step() -> datetime.date:
        train()
        kept.append(datetime.date.today())
        return datetime.date.today()

    assert step() == step() == kept[0] == kept[1] == datetime.date.today()
    assert type(kept[1]) is datetime.date


def test_times_of_numbers_that_are_known_before_a_call() -> None:
    """As the bars of `progress` have them."""
    train, said = training(), []

    @graphopt.compile
    def step(number: int) -> Any:
        train()
        left = datetime.timedelta(seconds=10 * number, minutes=1)
        said.append(f"{left}")
        return left, left.total_seconds()

    for number in range(4):
        left = datetime.timedelta(seconds=10 * number, minutes=1)
        assert step(number) == (left, left.total_seconds())
        assert said[-1] == str(left)
    assert len(step.captures) == 1


def test_a_step_decides_by_a_clock() -> None:
    """A line that is printed every so often: it was never printed, or always."""
    train, last, late = training(), time.perf_counter(), []

    @graphopt.compile
    def step(number: int) -> None:
        nonlocal last
        train()
        if time.perf_counter() - last > 30:
            late.append(number)
            last = time.perf_counter()

    step(0)
    step(1)
    for number in (2, 3, 4, 5):
        if number in (3, 5):
            last -= 31
        step(number)
    assert late == [3, 5]
    assert len(step.captures) <= 3  # in the first one `last` is a constant


def seconds_and_decisions(rank: int, pipeline: Any) -> Any:
    """Two ranks read their own clocks, and take their own ways."""
    train_module = nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in train_module.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(train_module.parameters(), 0.1)
    late: list[int] = []
    meter, last = Meter(), time.perf_counter()

    @graphopt.compile(pipeline=pipeline)
    def step(model: nn.Module, optimizer: Any, x: Tensor, number: int) -> None:
        nonlocal last
        start = time.perf_counter()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(time.perf_counter() - start)
        if time.perf_counter() - last > 30:
            late.append(number)
            last = time.perf_counter()

    for number in range(5):
        if number == 2 + rank:
            last -= 31
        step(train_module, optimizer, torch.full((2, 3), float(rank + number)), number)
    return late, meter.count, meter.val > 0, [p.tolist() for p in train_module.parameters()]


@pytest.mark.parametrize("pipeline", [[], "default"], ids=["none", "default"])
def test_ranks_read_their_own_clocks(two_ranks: Pool, pipeline: Any) -> None:
    found = two_ranks.run(seconds_and_decisions, pipeline)
    assert [late for late, *_ in found] == [[2], [3]]
    assert all(count == 5 and positive for _, count, positive, _ in found)
    assert found[0][3] == found[1][3]


def test_lowered() -> None:
    train, meter = training(), Meter()

    @graphopt.compile(lower="inductor")
    def step() -> Tensor:
        start = time.perf_counter()
        loss = train()
        meter.update(time.perf_counter() - start)
        return loss

    values = []
    for _ in range(3):
        step()
        values.append(meter.val)
    assert len(set(values)) == 3
    assert min(values) > 0
