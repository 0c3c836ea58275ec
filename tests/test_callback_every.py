"""`graphopt.callback(every=n)`: a captured step counts as eager code does, wherever the call is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
import test_callback as cases
from graphopt.host.counts import EagerCounts
from graphopt.tracing import callback as callback_module

Log = Callable[[str, Tensor], None]
EVERY = 3


class Layer(nn.Module):
    """A layer that logs what it makes."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(cases.FEATURES, cases.FEATURES)
        self._log = log

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self._log("layer", x)
        return x


class Model(nn.Module):
    """The same layer in a sequence and at two lines."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.sequence = nn.Sequential(*(Layer(log) for _ in range(2)))
        self.one, self.other = Layer(log), Layer(log)
        self.head = nn.Linear(cases.FEATURES, cases.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.sequence(x))
        return self.head(self.other(x))


def in_a_loop(log: Log, model: Model, loss: Tensor) -> None:
    for parameter in model.parameters():
        log("gradient", parameter.grad)


def at_two_places(log: Log, model: Model, loss: Tensor) -> None:
    log("loss", loss)
    for _ in range(2):
        log("twice", loss * 2)
        log("head", model.head.bias)


def from_a_generator(log: Log, model: Model, loss: Tensor) -> None:
    for value in (loss * n for n in range(4)):
        log("generated", value)


def by_itself(log: Log, model: Model, loss: Tensor) -> None:
    def again(depth: int) -> None:
        log("depth", loss * depth)
        if depth:
            again(depth - 1)

    again(2)


PARTS = [in_a_loop, at_two_places, from_a_generator, by_itself]


def seen_by(part: Callable[..., None], hooks: bool = False, **options: Any) -> list[Any]:
    """What callbacks saw in a training whose step is called at two lines; eager without options."""
    torch.manual_seed(0)
    seen: list[Any] = []

    def log(name: str, value: Tensor) -> None:
        graphopt.callback(lambda v: seen.append((name, v.tolist())), value, every=EVERY)

    model = Model(log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hooks:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: log("hook", gradient))

    def step(model: Model, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = cases.loss_of(model, x, y)
        loss.backward()
        part(log, model, loss)
        graphopt.callback(lambda v: seen.append(v.item()), loss, every=EVERY + 1)
        optimizer.step()
        optimizer.zero_grad()

    called = graphopt.compile(step, **options) if options else step
    for number in range(2):
        called(model, optimizer, *cases.batch(number))
    for number in range(7):
        x, y = cases.batch(number)
        rows = 4 if number == 3 else 6  # captured again
        called(model, optimizer, x[:rows], y[:rows])
    return seen


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_counts_as_eager_code(
    part: Callable[..., None], hooks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_module, "_counts", EagerCounts())  # other tests have counted, too
    expected = seen_by(part, hooks)
    assert expected
    assert seen_by(part, hooks, pipeline="default") == expected
