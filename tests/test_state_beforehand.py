"""Optimizer state that is made before the first call is traced: one trace, and eager's bits."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

import graphopt
from graphopt._compat.fresh_state import fresh_state

trace_module = importlib.import_module("graphopt.tracing.trace")

Step = Callable[[nn.Module, Optimizer, Tensor], Any]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": lambda p: Adadelta(p, lr=0.1),
    "Adam": lambda p: Adam(p, lr=0.1),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "Adam, foreach": lambda p: Adam(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "AdamW, rate as tensor": lambda p: AdamW(p, lr=torch.tensor(0.1)),
    "Adamax": lambda p: Adamax(p, lr=0.1),
    "NAdam": lambda p: NAdam(p, lr=0.1),
    "RAdam": lambda p: RAdam(p, lr=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.1),
    "RMSprop, centered": lambda p: RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "SGD": lambda p: SGD(p, lr=0.1),
}


class Parts(nn.Module):
    """Layers of which the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(3, 4), nn.Linear(2, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def looks_at_length(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() * (1 + len(optimizer.state))
    return _finished(loss, optimizer)


def asks_for_parameter(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    known = next(model.parameters()) in optimizer.state
    return _finished(model(x).square().mean() * (3 if known else 1), optimizer)


def saves_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    first = not optimizer.state_dict()["state"]
    return _finished(model(x).square().mean() * (2 if first else 1), optimizer)


def copies_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    first = not dict(optimizer.state)
    return _finished(model(x).square().mean() * (2 if first else 1), optimizer)


def _finished(loss: Tensor, optimizer: Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time a step is traced."""
    found: list[None] = []
    attempt = trace_module._attempt

    def counted(*args: Any) -> Any:
        found.append(None)
        return attempt(*args)

    monkeypatch.setattr(trace_module, "_attempt", counted)
    return found


def assert_as_eager(step: Step, make: Callable[[Any], Optimizer], model: nn.Module) -> None:
    """Four calls, their results, parameters and state, bit for bit."""
    ours, theirs = model, copy.deepcopy(model)
    optimizers = [make(each.parameters()) for each in (ours, theirs)]
    captured = graphopt.compile(step)
    for number in range(4):
        x = torch.full((2, 3), 0.3 + number)
        assert torch.equal(captured(ours, optimizers[0], x), step(theirs, optimizers[1], x))
        captured.flush()
        _assert_same_state(*optimizers)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def _assert_same_state(ours: Optimizer, theirs: Optimizer) -> None:
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for index, entries in a.items():
        assert entries.keys() == b[index].keys()
        for key, value in entries.items():
            same = torch.equal(value, b[index][key]) if isinstance(value, Tensor) else value == b
            assert same, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_trace(name: str, traces: list[None]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    assert_as_eager(plain, OPTIMIZERS[name], model)
    assert len(traces) == 1


def test_parameters_that_are_not_updated_get_no_state(traces: list[None]) -> None:
    model = Parts()
    model.last.bias.requires_grad_(False)
    assert_as_eager(plain, OPTIMIZERS["Adam"], model)
    assert len(traces) == 2


@pytest.mark.parametrize("step", [looks_at_length, asks_for_parameter, saves_state, copies_state])
def test_a_step_that_looks_at_state_finds_none_in_its_first_call(step: Step) -> None:
    assert_as_eager(step, OPTIMIZERS["Adam"], nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_state_is_that_of_a_first_step(name: str) -> None:
    """What is made for each optimizer is what its step begins with; nothing is left changed."""
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    attributes = dict(vars(optimizer))
    made = fresh_state(optimizer)
    assert not optimizer.state
    assert vars(optimizer).keys() == attributes.keys()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert made.keys() == optimizer.state.keys()
    for parameter, entries in made.items():
        assert entries.keys() == optimizer.state[parameter].keys()
