"""`graphopt.callback`: what a function of the user's sees in every step, captured and eager."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
import test_callback as cases
from graphopt import lowering
from graphopt.tracing.effects import callback as callback_module
from twins import assert_same

Seen = list[Any]
Step = Callable[..., Any]

FEATURES, CLASSES = 8, 4


class Net(nn.Module):
    """A network with statistics that is told what to do with its hidden layer."""

    def __init__(self, seen: Seen, inside: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, CLASSES)
        self._seen, self._inside = seen, inside

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu_()
        if self._inside:
            graphopt.callback(self._seen.append, hidden)
        return self.head(hidden)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (6,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def finish(optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# Steps: each takes what its callbacks are to append to


def the_loss(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        graphopt.callback(lambda value: seen.append(value.item()), loss)
        return finish(optimizer, loss)

    return step


def a_number(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        correct = (logits.argmax(-1) == y).sum()
        graphopt.callback(seen.append, loss.item())
        graphopt.callback(seen.append, correct.item())
        graphopt.callback(seen.append, loss.item() * 2 + 1)
        return finish(optimizer, loss)

    return step


def several(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        graphopt.callback(lambda: seen.append("begin"))
        loss = loss_of(model, x, y)
        graphopt.callback(lambda *values: seen.append(values), loss, loss, x, 3, "text", None)
        loss.backward()
        graphopt.callback(seen.append, model.head.weight.grad)
        optimizer.step()
        graphopt.callback(seen.append, loss)
        optimizer.zero_grad()
        graphopt.callback(lambda: seen.append("end"))
        return loss

    return step


def trees(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        values = {"loss": loss, "list": [loss * 2, (x, "constant")], "number": 3}
        graphopt.callback(lambda tree, *more: seen.append((tree, more)), values, [y], (), {"a": 1})
        return finish(optimizer, loss)

    return step


def parameters_before_and_after(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        graphopt.callback(lambda *values: seen.append(values), *model.parameters())
        finish(optimizer, loss)
        graphopt.callback(lambda *values: seen.append(values), *model.parameters())
        graphopt.callback(seen.append, model.norm.running_mean)
        return loss

    return step


def one_parameter_after(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = finish(optimizer, loss_of(model, x, y))
        graphopt.callback(seen.append, model.head.weight)
        return loss

    return step


def a_loop(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        for name, parameter in model.named_parameters():
            graphopt.callback(lambda g, name=name: seen.append((name, g)), parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def values_updated_later(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.first(x)
        graphopt.callback(seen.append, hidden)
        hidden = hidden * 2
        graphopt.callback(seen.append, hidden)
        hidden.add_(1)
        graphopt.callback(seen.append, hidden)
        return finish(optimizer, F.cross_entropy(model.head(hidden), y))

    return step


def in_no_grad(seen: Seen) -> Step:
    def log(value: Tensor) -> None:
        seen.append((torch.is_grad_enabled(), value.requires_grad, value))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        graphopt.callback(log, loss)
        with torch.no_grad():
            graphopt.callback(log, loss)
        return finish(optimizer, loss)

    return step


def in_autocast(seen: Seen) -> Step:
    def log(value: Tensor) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), value @ value.t()))

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
            graphopt.callback(log, x)
        graphopt.callback(log, x)
        return finish(optimizer, loss.float())

    return step


def changing_what_it_gets(seen: Seen) -> Step:
    def log(value: Tensor, weight: Tensor) -> None:
        value.zero_()
        weight.zero_()
        seen.append(value)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        graphopt.callback(log, loss, model.head.weight)
        return finish(optimizer, loss)

    return step


def a_gradient_hook(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.first(x)
        hidden.register_hook(lambda gradient: graphopt.callback(seen.append, gradient))
        loss = F.cross_entropy(model.head(hidden), y)
        return finish(optimizer, loss)

    return step


def computing_gradients(seen: Seen) -> Step:
    def log(value: Tensor) -> None:
        value.requires_grad_()
        (value**2).sum().backward()
        seen.append(value.grad)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        graphopt.callback(log, loss)
        return finish(optimizer, loss)

    return step


def under_a_device(seen: Seen) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.device("cpu"):
            loss = loss_of(model, x, y)
            graphopt.callback(seen.append, loss)
        return finish(optimizer, loss)

    return step


STEPS = [
    the_loss,
    a_number,
    several,
    trees,
    parameters_before_and_after,
    one_parameter_after,
    a_loop,
    values_updated_later,
    in_no_grad,
    in_autocast,
    changing_what_it_gets,
    a_gradient_hook,
    computing_gradients,
    under_a_device,
]


def run(
    make: Callable[[Seen], Step],
    steps: int = 4,
    inside: bool = False,
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> tuple[Seen, dict[str, Any]]:
    """What the callbacks saw, and the model afterwards; eager without options."""
    torch.manual_seed(0)
    seen: Seen = []
    model = Net(seen, inside)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    step = make(seen)
    called = graphopt.compile(step, **options) if options else step
    for number in range(steps):
        called(model, optimizer, *batch(number))
    return seen, model.state_dict()


@pytest.mark.covering(1)
@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_as_in_eager_code(make: Callable[[Seen], Step], pipeline: str) -> None:
    assert_same(run(make, pipeline=pipeline), run(make), make.__name__)


@pytest.mark.parametrize("make", [several, parameters_before_and_after, values_updated_later])
def test_lowered(make: Callable[[Seen], Step]) -> None:
    """Compiled code ends where a callback stands. Its numbers are not eager's to the last bit, but
    it is the same callbacks that see them."""
    sgd = torch.optim.SGD
    seen, _ = run(make, optimizer_class=sgd, lower=lowering.Options(min_ops=2))
    expected, _ = run(make, optimizer_class=sgd)
    assert_close(seen, expected)


def assert_close(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, Tensor):
        torch.testing.assert_close(actual, expected)
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_close(mine, theirs)
    else:
        assert actual == expected


def test_documented_example() -> None:
    results = doctest.testmod(callback_module)
    assert results.attempted and not results.failed


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
    monkeypatch.setattr(
        callback_module, "_counts", WeakKeyDictionary()
    )  # other tests have counted, too
    expected = seen_by(part, hooks)
    assert expected
    assert seen_by(part, hooks, pipeline="default") == expected
