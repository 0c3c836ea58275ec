"""Which objects there are before a trace, and Python's collector while a step is captured."""

from __future__ import annotations

import enum
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt._compat.tensor_classes import holders_of
from graphopt.errors import CaptureError
from graphopt.runtime.memory import frozen_objects_seen
from graphopt.tracing.outside.existing import births_noted, existing_now
from zoo import train_step


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def _collect() -> None:
    gc.collect()


def _look_at_frozen_objects() -> None:
    with frozen_objects_seen():
        pass


@pytest.fixture(params=[0, 1], ids=["", "frozen"])
def frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a program has frozen objects, as tests/frozen.py has."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: request.param)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("between", [None, _collect, _look_at_frozen_objects])
def test_each_trace_finds_what_was_made_before_it(between: Callable[[], None] | None) -> None:
    """Whatever the collector has gone through meanwhile."""
    gc.disable()
    callbacks = list(gc.callbacks)
    oldest = [object]
    with births_noted():
        old = [object]
        first = existing_now()
        new = [object]
        if between is not None:
            between()
        newer = [object]
        assert oldest in first and old in first
        assert new not in first and newer not in first
        second = existing_now()
        newest = [object]
        if between is not None:
            between()
        assert new in second and newer in second and oldest in second
        assert newest not in second
        assert new not in first and newest not in first
    assert gc.callbacks == callbacks


@pytest.mark.usefixtures("frozen")
def test_an_object_in_the_place_of_an_old_one_is_new() -> None:
    gc.disable()
    old = [[object] for _ in range(1000)]
    with births_noted():
        before = [[object] for _ in range(1000)]
        existing = existing_now()
        assert all(each in existing for each in (*old, *before))
        addresses = {*map(id, old), *map(id, before)}
        del old, before
        later = [[object] for _ in range(2000)]
        assert any(id(each) in addresses for each in later)
        assert not any(each in existing for each in later)


def test_nothing_is_kept_alive() -> None:
    tensor = torch.ones(3)
    expected = holders_of(tensor)
    with births_noted():
        existing = existing_now()
        assert tensor in existing
        assert holders_of(tensor) == expected
        holder = weakref.ref(nn.Linear(2, 2))
        gc.collect()
        assert holder() is None


@pytest.mark.usefixtures("frozen")
def test_what_others_have_the_collector_call_is_no_part_of_a_step() -> None:
    told: list[Any] = []

    def tell(phase: str, info: dict[str, int]) -> None:
        told.append(time.perf_counter())

    model = nn.Linear(3, 2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    gc.callbacks.append(tell)
    try:
        compiled = graphopt.compile(step)
        compiled(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 3))
    finally:
        gc.callbacks.remove(tell)
    assert all(type(each) is float for each in told)


@pytest.mark.usefixtures("frozen")
def test_classes_that_a_step_makes_are_its_own() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> tuple[float, str, int]:
        kinds = enum.Enum("Kinds", ["FIRST", "SECOND"])  # which counts its members in a list
        table = type("Table", (), {"rows": []})
        table.rows.append(kinds.FIRST.name)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.item(), table.rows[0], len(table.rows)  # type: ignore[attr-defined]

    compiled = graphopt.compile(step)
    for _ in range(3):
        assert compiled(torch.ones(1, 3))[1:] == ("FIRST", 1)
    assert len(compiled.captures) == 1


@pytest.mark.parametrize("enabled", [False, True])
def test_the_collector_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    model = nn.Sequential(nn.Linear(3, 2))
    step = graphopt.compile(train_step)
    step(
        model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 3), torch.tensor([0, 1] * 2)
    )
    assert gc.isenabled() is enabled
    with pytest.raises(CaptureError):
        graphopt.compile(_shown)(model, torch.randn(4, 3))
    assert gc.isenabled() is enabled


def _shown(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    {repr(loss.item()): 1}
    return loss
