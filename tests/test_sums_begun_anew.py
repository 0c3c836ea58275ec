"""Sums that a step adds to, shows, and sets to what they were: in its first call already."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphopt


class Averager:
    """As clovaai's text recognition has it: of tensors."""

    def __init__(self) -> None:
        self.reset()

    def add(self, value: torch.Tensor) -> None:
        self.n_count += value.data.numel()
        self.sum += value.data.sum()

    def reset(self) -> None:
        self.n_count, self.sum = 0, 0

    def val(self) -> Any:
        return self.sum / float(self.n_count) if self.n_count != 0 else 0


def _variable(every: int) -> Any:
    total, number = 0, 0.0

    def add(index: int, loss: torch.Tensor) -> None:
        nonlocal total, number
        total += loss.item()
        number += 1
        if index % every == 0:
            print(f"{index}: {total / number:.4f}")
            total, number = 0, 0.0

    return add, lambda: (total, number)


def _attribute(every: int) -> Any:
    state = SimpleNamespace(total=0.0, number=0)

    def add(index: int, loss: torch.Tensor) -> None:
        state.total += loss.item() * 2
        state.number += 1
        if index % every == 0:
            print(f"{index}: {state.total / state.number:.4f}")
            state.total, state.number = 0.0, 0

    return add, lambda: vars(state)


def _items(every: int) -> Any:
    sums: Any = {"loss": 0.0, "steps": 0}

    def add(index: int, loss: torch.Tensor) -> None:
        sums["loss"] += loss.item()
        sums["steps"] += 1
        if index % every == 0:
            print(f"{index}: {sums['loss'] / sums['steps']:.4f}")
            for key in sums:
                sums[key] = 0

    return add, lambda: sums


def _default_items(every: int) -> Any:
    sums: Any = defaultdict(float)

    def add(index: int, loss: torch.Tensor) -> None:
        sums["loss"] += loss.item()
        if index % every == 0:
            print(f"{index}: {sums['loss']:.4f}")
            sums["loss"] = 0.0

    return add, lambda: dict(sums)


def _tensors(every: int) -> Any:
    averager = Averager()

    def add(index: int, loss: torch.Tensor) -> None:
        averager.add(loss)
        if index % every == 0:
            print(f"{index}: {averager.val():.4f}")
            averager.reset()

    return add, lambda: {key: float(value) for key, value in vars(averager).items()}


def _kept_between(every: int) -> Any:
    """What is there in between decides, and is kept elsewhere."""
    state = SimpleNamespace(total=1.0, last=0.0)

    def add(index: int, loss: torch.Tensor) -> None:
        before = state.total
        state.total += loss.item()
        state.last = state.total - before
        if state.total > 1.1:
            print("large", index)
        state.total = before

    return add, lambda: vars(state)


class Counting(nn.Linear):
    """A model that keeps the sum itself."""

    total = 0.0


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize(
    "make", [_variable, _attribute, _items, _default_items, _tensors, _kept_between]
)
def test_a_sum_that_is_begun_anew(
    make: Any, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = _run(make, every, False), capsys.readouterr().out
    assert eager == (_run(make, every, True), capsys.readouterr().out)


def _run(make: Any, every: int, compiled: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    add, state = make(every)

    def step(index: int, x: torch.Tensor) -> None:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        add(index, loss)

    called = graphopt.compile(step) if compiled else step
    left = []
    for index in range(8):
        called(index, torch.randn(4, 3))
        left.append(repr(state()))
    return left, model.weight.tolist()


def test_a_sum_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model = Counting(3, 2)
        model.total = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(index: int, x: torch.Tensor) -> None:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.total += loss.item()
            if index % 2 == 0:
                print(f"{index}: {model.total / 2:.4f}")
                model.total = 0.0

        called = graphopt.compile(step) if compiled else step
        left = []
        for index in range(6):
            called(index, torch.randn(4, 3))
            left.append(model.total)
        return left, model.weight.tolist()

    eager = run(False), capsys.readouterr().out
    assert eager == (run(True), capsys.readouterr().out)
