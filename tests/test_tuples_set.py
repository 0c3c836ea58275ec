"""A step that sets `betas` of parameter groups, as fastai's one-cycle schedule does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from tests.loops import Loop, graphs_of, told, trained


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


SETTERS: dict[str, Callable[[dict[str, Any], int, _Schedule], Any]] = {
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


@pytest.mark.parametrize("name", SETTERS)
def test_tuples_are_set_in_each_call(name: str) -> None:
    at_most = 8 if name == "kept numbers" else 3  # a program changes these between the calls
    assert graphs_of(_looped(SETTERS[name])) <= at_most


@pytest.mark.parametrize("name", SETTERS)
def test_items_are_set_as_update_sets_them(name: str) -> None:
    class Items(dict[str, Any]):
        """Sets one item of a group."""

        def __init__(self, group: dict[str, Any]) -> None:
            super().__init__(group)
            self.group = group

        def update(self, **settings: Any) -> None:  # type: ignore[override]
            for key, value in settings.items():
                self.group[key] = value

    setter = SETTERS[name]
    if setter in (_exchange, _there_and_back):
        return
    graphs_of(_looped(lambda group, index, kept: setter(Items(group), index, kept)))


def _run(compiled: bool, setter: Callable[[dict[str, Any], Tensor], Any]) -> list[Any]:
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
        _run(True, setter)


NUMBERS: list[Callable[[Tensor], Any]] = [lambda x: x.mean().item(), lambda x: numpy.float64(0.6)]


@pytest.mark.parametrize("number", NUMBERS)
def test_other_numbers_are_right_or_refused(number: Callable[[Tensor], Any]) -> None:
    def setter(group: dict[str, Any], x: Tensor) -> None:
        group["betas"] = (number(x), 0.9)

    try:
        found = _run(True, setter)
    except graphopt.GraphOptError:
        return
    assert found == _run(False, setter)
