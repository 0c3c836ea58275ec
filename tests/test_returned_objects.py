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


class Statistics:
    """As OpenNMT's: returned by each step, and added up outside."""

    def __init__(self, loss: Any = 0, count: Any = 0) -> None:
        self.loss, self.count, self.text = loss, count, None

    def update(self, other: Statistics) -> None:
        self.loss += other.loss
        self.count += other.count


class Named(Statistics):
    def __init__(self, loss: Any, count: Any) -> None:
        super().__init__(loss, count)
        self.name = f"{loss:.4f}"


class Slots:
    __slots__ = ("loss", "output")

    def __init__(self, loss: Any, output: Any) -> None:
        self.loss, self.output = loss, output


class Record(dict[str, Any]):
    """Whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Loud(dict[str, Any]):
    """Whose methods are not called when it is made anew."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, ("set", value))

    def __iter__(self) -> Any:
        return iter(["none"])


class Rows(list[Any]):
    pass


@dataclass
class Output:
    loss: Any
    inner: Any = None


Pair = namedtuple("Pair", "loss count")


class Trained:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = optim.SGD(self.model.parameters(), 0.1)
        self.total, self.last, self.rows = Statistics(), None, {}

    def step(self, make: Callable[[Trained, Tensor, Tensor], Any], x: Tensor) -> Any:
        self.optimizer.zero_grad()
        output = self.model(x)
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        return make(self, loss, output)


def _loud(loss: Tensor) -> Loud:
    made = Loud()
    made["loss"] = loss.item()
    made.note = "x"  # type: ignore[attr-defined]
    return made


MADE: dict[str, Callable[[Trained, Tensor, Tensor], Any]] = {
    "numbers": lambda t, loss, out: Statistics(loss.item(), 4),
    "tensors": lambda t, loss, out: Statistics(loss.detach(), out.detach().argmax(1)),
    "text": lambda t, loss, out: Named(loss.item(), 1),
    "slots": lambda t, loss, out: Slots(loss.item(), out.detach()),
    "nested": lambda t, loss, out: {"a": [Output(loss.item(), Statistics(1, 2))], "b": Pair(1, 2)},
    "namespace": lambda t, loss, out: types.SimpleNamespace(loss=loss.item(), name="x"),
    "within a tuple": lambda t, loss, out: Pair(Statistics(loss.item()), "x"),
    "record": lambda t, loss, out: Record(loss=loss.item(), output=out.detach()),
    "loud": lambda t, loss, out: _loud(loss),
    "rows": lambda t, loss, out: Rows([loss.item(), 2]),
    "device": lambda t, loss, out: (out.device, out.dtype),
    "of outside": lambda t, loss, out: Statistics(t.total, loss.item()),
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


def test_added_up_outside() -> None:
    totals = []
    for compiled in (False, True):
        trained = Trained()
        run: Any = graphopt.compile(trained.step) if compiled else trained.step
        for n in range(4):
            trained.total.update(run(MADE["numbers"], torch.ones(4, 3) * n))
        totals.append((trained.total.loss, trained.total.count))
    assert totals[0] == totals[1]


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
    made = Statistics(loss.item())
    return made, made


def _kept(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    trained.last = Output(loss.item())
    return trained.last


def _in_item(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    trained.rows["last"] = Statistics(loss.item())
    return trained.rows["last"]


def _in_itself(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    made: Any = Statistics(loss.item())
    made.text = made
    return made


def _of_local_class(trained: Trained, loss: Tensor, out: Tensor) -> Any:
    class Local:
        def __init__(self, loss: Any) -> None:
            self.loss = loss

    return Local(loss.item())


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


@pytest.mark.parametrize("make", [_in_itself, _of_local_class])
def test_refused(make: Callable[..., Any]) -> None:
    """Objects that contain themselves, or whose class would be another one in each call."""
    trained = Trained()
    with pytest.raises(graphopt.CaptureError, match="what the step returns is a"):
        graphopt.compile(trained.step)(make, torch.ones(4, 3))
    assert trained.last is None
    assert not trained.rows
