"""Objects that a step makes and returns: each call makes them anew; objects from outside."""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import graphopt


class Total:
    """Is there before the step."""

    def __init__(self) -> None:
        self.loss: Any = 0


class Plain:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


class Record(dict[str, Any]):
    """A user's dictionary."""


@dataclass
class Output:
    loss: Any
    inner: Any = None


@dataclass(slots=True)
class Slots:
    loss: Any
    output: Any


Pair = namedtuple("Pair", "loss count")


class Trained:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = optim.SGD(self.model.parameters(), 0.1)
        self.total, self.last, self.rows = Total(), None, {}

    def step(self, make: Callable[[Trained, Tensor, Tensor], Any], x: Tensor) -> Any:
        self.optimizer.zero_grad()
        output = self.model(x)
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        return make(self, loss, output)


MADE: dict[str, Callable[[Trained, Tensor, Tensor], Any]] = {
    "numbers": lambda t, loss, out: Output(loss.item(), 4),
    "tensors": lambda t, loss, out: Output(loss.detach(), out.detach().argmax(1)),
    "slots": lambda t, loss, out: Slots(loss.item(), out.detach()),
    "nested": lambda t, loss, out: {"a": [Output(loss.item(), Output(1, 2))], "b": Pair(1, 2)},
    "within a tuple": lambda t, loss, out: Pair(Output(loss.item()), "x"),
    "device": lambda t, loss, out: (out.device, out.dtype),
    "of outside": lambda t, loss, out: Output(t.total, loss.item()),
}


def _shown(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if depth > 4 or isinstance(value, (nn.Module, Trained)):
        return type(value).__name__
    if isinstance(value, dict):
        items = [(k, _shown(v, depth + 1)) for k, v in dict.items(value)]
        more = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in dict(items)}
        return type(value).__name__, items, more
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_shown(each, depth + 1) for each in value]
    names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
    if names:
        return type(value).__name__, {n: _shown(getattr(value, n), depth + 1) for n in names}
    return type(value).__name__, repr(value)


@pytest.mark.parametrize("name", MADE)
def test_made_anew(name: str) -> None:
    make = MADE[name]
    found: list[Any] = []
    for compiled in (False, True):
        trained = Trained()
        run: Any = graphopt.compile(trained.step) if compiled else trained.step
        torch.manual_seed(1)
        calls = [run(make, torch.randn(4, 3)) for _ in range(4)]
        assert len({id(call) for call in calls}) == 4
        found.append([*map(_shown, calls), trained.model.weight.tolist()])
        assert not compiled or len(run.captures) == 1
    assert found[0] == found[1]


def test_objects_from_outside_are_returned_themselves() -> None:
    trained = Trained()

    def counts(trained: Trained, loss: Tensor, out: Tensor) -> Any:
        trained.total.loss += loss.item()
        return trained.total, {"model": trained.model}

    run: Any = graphopt.compile(trained.step)
    for _ in range(4):
        total, named = run(counts, torch.ones(4, 3))
        assert total is trained.total
        assert named["model"] is trained.model
    assert type(total.loss) is float


def _twice(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    made = Output(loss.item())
    return made, made


def _kept(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    trained.last = Output(loss.item())
    return trained.last


def _in_item(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    trained.rows["last"] = Output(loss.item())
    return trained.rows["last"]


@pytest.mark.parametrize("make", [_twice, _kept, _in_item])
def test_one_object_in_all_its_places(make: Callable[..., Any]) -> None:
    trained = Trained()
    step = graphopt.compile(trained.step)
    first, second = (step(make, torch.ones(4, 3)) for _ in range(2))
    if make is _twice:
        assert first[0] is first[1] and second[0] is second[1]
        first, second = first[0], second[0]
    elif make is _kept:
        assert trained.last is second
    else:
        assert trained.rows["last"] is second
    assert first is not second
    assert first.loss > second.loss


REFUSED: dict[str, Callable[[Trained, Tensor, Tensor], Any]] = {
    "an object": lambda t, loss, out: Plain(loss.item()),
    "in a dictionary": lambda t, loss, out: {"a": [Plain(1)]},
    "a namespace": lambda t, loss, out: types.SimpleNamespace(loss=loss.item()),
    "a dictionary's subclass": lambda t, loss, out: Record(loss=loss.item()),
    "a set": lambda t, loss, out: {1, 2},
    "a function": lambda t, loss, out: lambda: loss,
    "a distribution": lambda t, loss, out: torch.distributions.Bernoulli(logits=out),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Objects of other classes, which no graph's results make."""
    trained = Trained()
    with pytest.raises(graphopt.CaptureError, match="what the step returns is a") as refused:
        graphopt.compile(trained.step)(REFUSED[name], torch.ones(4, 3))
    assert "return tensors" in str(refused.value)
    assert trained.last is None
    assert not trained.rows
