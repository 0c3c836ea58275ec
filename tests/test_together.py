"""Guards that are looked at together: whatever changes, after however many calls, and whatever has
changed again and again before, each call is eager code's."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.guards.modules import ModuleGuards
from graphopt.guards.unchanged import StateSnapshot, Together


class Scale:
    power = 1.0


class Recipe:
    """All that a step reads from outside."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {"weight": 0.5}
        self.names = ["a", "b"]
        self.scale = Scale()


def default_power(x: Tensor, power: float = 1.0) -> Tensor:
    return x * power


def built() -> tuple[nn.Module, torch.optim.Optimizer, Recipe]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.LeakyReLU(0.1), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Recipe()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = default_power(model(x)).square().mean() * recipe.table["weight"]
        if "more" in recipe.table:
            loss = loss * recipe.table["more"]
        loss = loss * len(recipe.names) * recipe.scale.power
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _number(change: int) -> float:
    return 0.5 + change / 8


def _add_or_drop(table: dict[str, Any]) -> None:
    if table.pop("more", None) is None:
        table["more"] = 2


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer, Recipe, int], object]] = {
    "item": lambda model, optimizer, recipe, n: recipe.table.update(weight=_number(n)),
    "missing": lambda model, optimizer, recipe, n: _add_or_drop(recipe.table),
    "length": lambda model, optimizer, recipe, n: recipe.names.append("c"),
    "class": lambda model, optimizer, recipe, n: setattr(Scale, "power", _number(n)),
    "object": lambda model, optimizer, recipe, n: setattr(recipe, "scale", Scale()),
    "shadowed": lambda model, optimizer, recipe, n: setattr(recipe.scale, "power", _number(n)),
    "default": lambda model, optimizer, recipe, n: setattr(
        default_power, "__defaults__", (_number(n),)
    ),
    "mode": lambda model, optimizer, recipe, n: model.train(not model.training),
    "attribute": lambda model, optimizer, recipe, n: setattr(
        model[2], "negative_slope", _number(n)
    ),
    "submodule": lambda model, optimizer, recipe, n: setattr(model, "1", nn.Dropout(0.0)),
    "setting": lambda model, optimizer, recipe, n: optimizer.param_groups[0].update(
        momentum=_number(n)
    ),
    "rate": lambda model, optimizer, recipe, n: optimizer.param_groups[0].update(
        lr=_number(n) / 64
    ),
    "state": lambda model, optimizer, recipe, n: optimizer.state.clear(),
    "frozen": lambda model, optimizer, recipe, n: model[0].weight.requires_grad_(
        not model[0].weight.requires_grad
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    Scale.power, default_power.__defaults__ = 1.0, (1.0,)


def run(changes: list[str | None], compiled: bool) -> list[Tensor]:
    """What is left after a call behind each change."""
    Scale.power, default_power.__defaults__ = 1.0, (1.0,)
    model, optimizer, recipe = built()
    step = step_of(model, optimizer, recipe)
    if compiled:
        step = graphopt.compile(step, max_graphs=64)
    data = torch.randn(len(changes), 4, 3, generator=torch.Generator().manual_seed(1))
    left = []
    for number, change in enumerate(changes):
        if change is not None:
            CHANGES[change](model, optimizer, recipe, number)
        left.append(step(data[number]).clone())
    momenta = [state.get("momentum_buffer") for state in optimizer.state.values()]
    return [*left, *model.parameters(), *(each for each in momenta if each is not None)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("calls", [1, 4])
def test_a_change_is_seen(change: str, calls: int) -> None:
    changes: list[str | None] = [None] * calls + [change, None, None]
    for mine, expected in zip(run(changes, True), run(changes, False), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("often", ["item", "rate", "mode", "object", "state"])
def test_what_changes_in_each_call_hides_nothing(often: str, seed: int) -> None:
    generator = random.Random(f"{often} {seed}")
    others = generator.sample([None, *CHANGES], 5)
    changes: list[str | None] = []
    for other in others:
        changes += [often, often, other]
    for mine, expected in zip(run(changes, True), run(changes, False), strict=True):
        assert torch.equal(mine, expected)


class Guard:
    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.look()

    def look(self) -> None:
        self.unchanged = StateSnapshot()
        self.unchanged.has_items(self.table)


def test_a_guard_that_changes_again_and_again_is_left_to_itself() -> None:
    steady, moving = Guard({"a": 1}), Guard({"b": 0})
    together = Together([steady, moving])
    assert not together.unchanged()
    together.note()
    for number in range(1, 5):
        assert set(together.unchanged()) == {steady, moving}
        moving.table["b"] = number
        assert not together.unchanged()
        moving.look()
        together.note()
    assert set(together.unchanged()) == {steady}
    moving.table["b"] = 17
    assert set(together.unchanged()) == {steady}
    steady.table["a"] = 2
    assert not together.unchanged()


def test_what_one_guard_forgets_is_kept_by_none() -> None:
    value = nn.Linear(1, 1)
    reference = weakref.ref(value)
    first, second = Guard({"a": value}), Guard({"b": 1})
    together = Together([first, second])
    together.note()
    assert together.unchanged()
    first.table.clear()
    del value
    gc.collect()
    assert reference() is not None, "it is part of what was there"
    first.unchanged.forget()
    gc.collect()
    assert reference() is None
    assert not first.unchanged.holds()
    assert not together.unchanged()


def test_modules_that_are_forgotten_are_kept_by_none() -> None:
    module = nn.Linear(1, 1)
    weight = weakref.ref(module.weight)
    modules, other = ModuleGuards([("module", module, ())]), Guard({"a": 1})
    together = Together([modules, other])
    together.note()
    assert modules in together.unchanged()
    del module
    gc.collect()
    assert weight() is not None
    modules.forget()
    gc.collect()
    assert weight() is None
    assert not together.unchanged()
