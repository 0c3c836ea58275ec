"""Numbers that a step counts in places where nothing is at first: the class, a default, a module of
builtins or a function has what it begins from. All calls count, the first one once."""

from __future__ import annotations

import builtins
import collections
import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Count = Callable[[Any, float], Any]


class Box:
    number: Any = 0

    def __init__(self) -> None:
        self.held: Any = None
        type(self).number = 0


class Missing(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 5


def in_class(box: Any, loss: float) -> Any:
    box.number += 1
    return box.number


def twice(box: Any, loss: float) -> None:
    box.number += 1
    box.number += 1


def unread(box: Any, loss: float) -> None:
    box.number += 1


def of_losses(box: Any, loss: float) -> None:
    box.number = 0.9 * box.number + 0.1 * loss


def smallest(box: Any, loss: float) -> None:
    box.number = min(box.number, -loss)


def flag(box: Any, loss: float) -> Any:
    box.number = not box.number
    return box.number


def both(box: Any, loss: float) -> Any:
    box.number += 1
    type(box).number += 10
    return box.number + type(box).number


def at_key(box: Any, loss: float) -> None:
    box.held["k"] += 1


def at_key_of_losses(box: Any, loss: float) -> None:
    box.held["k"] += loss


def of_an_attribute(box: Any, loss: float) -> None:
    box.held.calls = getattr(box.held, "calls", 0) + 1


def begun_by_the_step(box: Any, loss: float) -> None:
    if not hasattr(box.held, "calls"):
        box.held.calls = 0
    box.held.calls += 1


def through_a_proxy(box: Any, loss: float) -> Any:
    box.held["k"] = box.shown["k"] + 1
    return box.shown["k"]


def in_builtins(box: Any, loss: float) -> Any:
    global COUNTED_HERE
    COUNTED_HERE += 1
    return COUNTED_HERE


def function() -> Any:
    def some() -> None:
        return None

    return some


CASES: dict[str, tuple[Count, Callable[[], Any]]] = {
    **{
        count.__name__: (count, lambda: None)
        for count in (in_class, twice, unread, of_losses, smallest, flag, both)
    },
    "default dictionary": (at_key, lambda: collections.defaultdict(int)),
    "default of losses": (at_key_of_losses, lambda: collections.defaultdict(float)),
    "counter": (at_key, collections.Counter),
    "missing": (at_key, Missing),
    "chain": (at_key, lambda: collections.ChainMap({}, {"k": 3})),
    "chain's own": (at_key, lambda: collections.ChainMap({"k": 1}, {"k": 3})),
    "users' dictionary": (at_key, lambda: collections.UserDict(k=1)),
    "function": (of_an_attribute, function),
    "function begun": (begun_by_the_step, function),
    "partial": (of_an_attribute, lambda: functools.partial(function())),
    "module": (of_an_attribute, lambda: types.ModuleType("made_here")),
    "namespace": (of_an_attribute, SimpleNamespace),
    "proxy": (through_a_proxy, lambda: {"k": 1}),
    "builtins": (in_builtins, lambda: None),
}


def look(box: Box) -> Any:
    held = box.held
    if isinstance(held, (dict, collections.ChainMap, collections.UserDict)):
        return dict(held)
    return box.number if held is None else held.calls


def left_by(name: str, compiled: bool) -> list[Any]:
    count, make = CASES[name]
    torch.manual_seed(0)
    builtins.COUNTED_HERE = 3  # type: ignore[attr-defined]
    globals().pop("COUNTED_HERE", None)
    model, box = nn.Linear(4, 4), Box()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    box.held = make()
    if count is through_a_proxy:
        box.shown = types.MappingProxyType(box.held)  # type: ignore[attr-defined]

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), count(box, loss.item())

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for number in range(5):
        loss, counted = used(torch.full((3, 4), 1.0 + number))
        found.append((loss.item(), counted, look(box), globals().get("COUNTED_HERE")))
    return found


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str) -> None:
    assert left_by(name, True) == left_by(name, False)


def test_a_model_that_counts_its_calls() -> None:
    class Counting(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) * self.calls  # type: ignore[no-any-return]

    def run(compiled: bool) -> list[Any]:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        used: Any = graphopt.compile(step) if compiled else step
        return [(used(torch.ones(3, 4)).item(), model.calls) for _ in range(5)]

    assert run(True) == run(False)
