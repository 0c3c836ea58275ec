"""Tensors that somebody holds while their update is in flight, on real ranks, against eager DDP."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gloo import Pool, pool
from held_cases import (
    HOLDERS,
    OF_PARAMETERS,
    READERS,
    STATE_HOLDERS,
    VIEWS,
    WRITERS,
    Action,
    Holder,
    copies,
    parameters,
    states,
)
from scenario import step
from twins import Twins, World, assert_same, world
from zoo import MODELS

pytestmark = pytest.mark.slow

MODEL = "mlp"


def cases() -> dict[str, tuple[Holder, Action, bool]]:
    """Holder, action, and whether the update may be in flight while it is held."""
    found: dict[str, tuple[Holder, Action, bool]] = {}
    for name, action in {**READERS, **OF_PARAMETERS}.items():
        found[f"parameters: {name}"] = (parameters, action, True)
    for name, action in WRITERS.items():
        found[f"parameters, written: {name}"] = (parameters, action, True)
        found[f"states, written: {name}"] = (states, action, True)
    for name, action in READERS.items():
        found[f"states: {name}"] = (states, action, True)
    for name, (holder, tensors) in {**HOLDERS, **STATE_HOLDERS}.items():
        found[f"{name}: read"] = (holder, _after(tensors, copies), True)
        found[f"{name}: written"] = (holder, _after(tensors, WRITERS["clamp_"]), True)
        found[f"{name}: lists"] = (holder, _after(tensors, WRITERS["foreach mul_"]), True)
    for name, (holder, action) in VIEWS.items():
        found[f"view: {name}"] = (holder, action, False)
    return found


def _after(tensors: Callable[[Any], Any], action: Action) -> Action:
    return lambda held: action(tensors(held))


class Ways:
    """Both twins in one training, in which one case follows another."""

    def __init__(self, rank: int, pipeline: str) -> None:
        def build() -> World:
            return world(step, MODEL, "adamw-foreach")

        self.twins = Twins(build, ddp=True, seed=20 + rank, pipeline=pipeline)
        self.rank, self.count = rank, 0
        self.step(3)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            batch = MODELS[MODEL].batch(1000 * self.rank + self.count)
            self.twins.step_unseen(*batch)

    @property
    def in_flight(self) -> bool:
        return self.twins.compiled.graph_module.in_flight

    def run(self, holder: Holder, action: Action, late: bool) -> str:
        """One case: "exact", "kept in its step", or what went wrong."""
        held = [holder(w) for w in (self.twins.eager, self.twins.captured)]
        self.step(2)
        if self.in_flight is not late:
            return "in flight" if self.in_flight else "not in flight"
        eager, captured = (plain(action(kept)) for kept in held)
        assert_same(captured, eager, "what was read")
        self.step()
        self.twins.compare_state()
        return "exact" if late else "kept in its step"


def plain(value: Any) -> Any:
    """A result without history, as lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def run_cases(rank: int, names: list[str], pipeline: str) -> dict[str, str]:
    ways, found = Ways(rank, pipeline), {}
    for name in names:
        try:
            found[name] = ways.run(*cases()[name])
        except AssertionError as error:
            found[name] = f"wrong: {str(error)[:200]}"
            ways = Ways(rank, pipeline)
        gc.collect()
    ways.twins.finish()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with pool(2) as ranks:
        yield ranks


def check(two_ranks: Pool, names: list[str], pipeline: str = "default") -> Counter[str]:
    for found in two_ranks.run(run_cases, names, pipeline, timeout=600.0):
        good = ("exact", "kept in its step")
        assert {name: way for name, way in found.items() if way not in good} == {}
    return Counter(found.values())


@pytest.mark.full
def test_every_way_of_holding_is_exact(two_ranks: Pool) -> None:
    counts = check(two_ranks, list(cases()))
    assert counts.total() >= 150
    print(dict(counts))
