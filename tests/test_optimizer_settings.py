"""Steps that set what is in parameter groups: switches, tuples, and what is there anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from tests.loops import Loop, graphs_of, told, trained


def _trained(compiled: bool, kept: Any, later: Any, key: str = "max_norm_ratio") -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters()), "max_norm": 1.0, key: kept}], lr=0.1
    )

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["max_norm"] = 0.5
            group[key] = group[key]
            if group[key] is not None:
                nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
        optimizer.step()
        return loss.item()

    run = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for index in range(5):
        if index == 3:
            optimizer.param_groups[0][key] = later
        loss = run(torch.randn(3, 4))
        found += [loss, model.weight.tolist(), *map(str, optimizer.param_groups[0].values())][:-1]
    return found


@pytest.mark.parametrize(("kept", "later"), [(None, None), (None, "yes"), ("yes", None)])
def test_it_stays_what_it_is(kept: Any, later: Any) -> None:
    assert _trained(True, kept, later) == _trained(False, kept, later)


def test_another_value_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.param_groups[0]["note"] = "other"
        model(x).sum().backward()
        optimizer.step()

    optimizer.param_groups[0]["note"] = "one"
    with pytest.raises(CaptureError, match="changes 'note' of an optimizer's parameter group"):
        graphopt.compile(step)(torch.randn(3, 4))


Setter = Callable[[dict[str, Any], int], Any]


def _schedule(group: dict[str, Any], index: int) -> None:
    """As SHOT's `lr_scheduler`, and many that follow it."""
    group["lr"] = 0.1 * (1 + index) ** -0.75
    group["weight_decay"] = 1e-3
    group["momentum"] = 0.9
    group["nesterov"] = True


SETTERS: dict[str, Setter] = {
    "schedule": _schedule,
    "by a number": lambda group, index: group.update(nesterov=index > 1, momentum=0.9),
    "to and fro": lambda group, index: group.update(maximize=not group["maximize"]),
    "a new one": lambda group, index: group.setdefault("frozen", True),
    "a new None": lambda group, index: group.update(extra=None),
    "None for a number": lambda group, index: group.update(extra=index if index < 2 else None),
    "there and back": lambda group, index: [group.update(maximize=b) for b in (True, False)],
    "a number for None": lambda group, index: group.update(extra=None if index < 2 else index),
    "a number for a switch": lambda group, index: group.update(nesterov=0),
}  # fmt: skip


def _run(compiled: bool, setter: Setter, **there: Any) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0].update(there)

    def step(x: Tensor, index: int) -> Any:
        for group in optimizer.param_groups:
            setter(group, index)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        return optimizer.param_groups[0].get("extra", "nothing")

    called = graphopt.compile(step) if compiled else step
    results = []
    for index in range(5):
        found = called(torch.randn(2, 3), index)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        results.append((found, group, net.weight.tolist()))
    return results


@pytest.mark.parametrize("name", SETTERS)
def test_switches_are_set_in_each_call(name: str) -> None:
    assert _run(True, SETTERS[name]) == _run(False, SETTERS[name])


@pytest.mark.parametrize("value", ["text", torch.tensor(True)])
def test_other_settings_are_refused(value: Any) -> None:
    with pytest.raises(graphopt.CaptureError, match="changes 'extra' of an optimizer's"):
        _run(True, lambda group, index: group.update(extra=value))


def test_taking_a_setting_away_is_refused() -> None:
    def take_away(group: dict[str, Any], index: int) -> None:
        del group["extra"]

    with pytest.raises(graphopt.CaptureError, match="changes 'extra' of an optimizer's"):
        _run(True, take_away, extra=1)


class _Schedule:
    """Numbers and tuples that the program keeps outside the optimizer."""

    def __init__(self) -> None:
        self.momentum, self.second, self.pair = [0.95], 0.99, (0.8, 0.98)
        self.count = 0


def _looped(setter: Callable[[dict[str, Any], int, _Schedule], Any]) -> Callable[[], Loop]:
    def make() -> Loop:
        net, kept = nn.Linear(4, 2), _Schedule()
        optimizer = torch.optim.Adam(net.parameters(), 0.1)

        def step(number: int, x: Tensor) -> Any:
            for group in optimizer.param_groups:
                setter(group, number, kept)
            loss = trained(net, optimizer, x)
            return loss.detach(), optimizer.param_groups[0]["betas"][0]

        def left() -> Any:
            group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            state = [told(each) for each in optimizer.state.values()]
            return told(net), told(group), state, told(vars(kept))

        def before(number: int) -> None:
            kept.momentum = [0.95 - number / 50]
            if number == 4:
                kept.second = 0.97
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)

        return Loop(step, left, before)

    return make


def _exchange(group: dict[str, Any], index: int, kept: _Schedule) -> None:
    group["betas"] = (kept.pair[0], group["betas"][1])
    kept.pair = (kept.pair[0] * 0.99, kept.pair[1])


def _there_and_back(group: dict[str, Any], index: int, kept: _Schedule) -> None:
    former = group["betas"]
    group["betas"] = (0.1, 0.2)
    group["betas"] = former


SETTERS_OF_TUPLES_SET: dict[str, Callable[[dict[str, Any], int, _Schedule], Any]] = {
    "constants": lambda group, index, kept: group.update(betas=(0.7, 0.9)),
    "numbers of the call": lambda group, index, kept: group.update(betas=(0.5 + index / 20, 0.9)),
    "kept numbers": lambda group, index, kept: group.update(betas=(kept.momentum[0], kept.second)),
    "of what is there": lambda group, index, kept: group.update(
        betas=(group["betas"][0] * 0.99, group["betas"][1])
    ),
    "a kept tuple": lambda group, index, kept: group.update(betas=kept.pair),
    "what is there": lambda group, index, kept: group.update(betas=tuple(group["betas"])),
    "now and then": lambda group, index, kept: index % 3 or group.update(betas=(0.6, 0.9)),
    "exchanged": _exchange,
    "there and back": _there_and_back,
}


@pytest.mark.parametrize("name", SETTERS_OF_TUPLES_SET)
def test_tuples_are_set_in_each_call(name: str) -> None:
    at_most = 8 if name == "kept numbers" else 3  # a program changes these between the calls
    assert graphs_of(_looped(SETTERS_OF_TUPLES_SET[name])) <= at_most


@pytest.mark.parametrize("name", SETTERS_OF_TUPLES_SET)
def test_items_are_set_as_update_sets_them(name: str) -> None:
    class Items(dict[str, Any]):
        """Sets one item of a group."""

        def __init__(self, group: dict[str, Any]) -> None:
            super().__init__(group)
            self.group = group

        def update(self, **settings: Any) -> None:  # type: ignore[override]
            for key, value in settings.items():
                self.group[key] = value

    setter = SETTERS_OF_TUPLES_SET[name]
    if setter in (_exchange, _there_and_back):
        return
    graphs_of(_looped(lambda group, index, kept: setter(Items(group), index, kept)))


def _run_with_tuples_set(
    compiled: bool, setter: Callable[[dict[str, Any], Tensor], Any]
) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)

    def step(x: Tensor) -> Any:
        setter(optimizer.param_groups[0], x)
        return trained(net, optimizer, x).detach()

    called = graphopt.compile(step) if compiled else step
    return [
        (told(called(torch.rand(3, 4))), told(net), told(optimizer.param_groups[0]["betas"]))
        for _ in range(4)
    ]


OTHERS: list[tuple[str, Any]] = [
    ("extra", (0.1, 0.2)),
    ("betas", [0.1, 0.2]),
    ("betas", (0.1, "text")),
    ("betas", (torch.tensor(0.1), torch.tensor(0.2))),
    ("betas", ((0.1, 0.2), 0.3)),
]


@pytest.mark.parametrize(("key", "value"), OTHERS)
def test_others_are_refused(key: str, value: Any) -> None:
    def setter(group: dict[str, Any], x: Tensor) -> None:
        group[key] = value

    with pytest.raises(graphopt.CaptureError, match=f"changes '{key}' of an optimizer's"):
        _run_with_tuples_set(True, setter)


NUMBERS: list[Callable[[Tensor], Any]] = [lambda x: x.mean().item(), lambda x: numpy.float64(0.6)]


@pytest.mark.parametrize("number", NUMBERS)
def test_other_numbers_are_right_or_refused(number: Callable[[Tensor], Any]) -> None:
    def setter(group: dict[str, Any], x: Tensor) -> None:
        group["betas"] = (number(x), 0.9)

    try:
        found = _run_with_tuples_set(True, setter)
    except graphopt.GraphOptError:
        return
    assert found == _run_with_tuples_set(False, setter)
