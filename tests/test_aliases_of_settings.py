"""What the program holds of a step's parameter groups and tensors under other names: everything
compared with eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from loops import Loop, graphs_of, run, trained

Step = Callable[[int, Tensor], Any]


def loop(
    make: Callable[[nn.Module, torch.optim.Optimizer], tuple[Step, Any]],
    before: Callable[[int, Any], Any] = lambda number, groups: None,
) -> Callable[[], Loop]:
    def made() -> Loop:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step, kept = make(model, optimizer)
        groups = optimizer.param_groups
        return Loop(
            step, lambda: [model, groups[0]["lr"], kept], lambda number: before(number, groups)
        )

    return made


class Rates:
    """A schedule of the program's, which holds the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.calls = optimizer.param_groups, 0
        self.base = [group["lr"] for group in self.groups]

    def step(self) -> None:
        self.calls += 1
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base / self.calls


def by_an_object(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    rates, kept = Rates(optimizer), {}  # type: tuple[Rates, dict[str, Any]]

    def step(number: int, x: Tensor) -> Any:
        rates.step()
        kept["lr"] = rates.groups[0]["lr"]
        return trained(model, optimizer, x)

    return step, kept


def by_a_variable(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group = optimizer.param_groups[0]

    def step(number: int, x: Tensor) -> Any:
        group["lr"] = 0.05 / (number + 1)
        before = optimizer.param_groups[0]["lr"]
        loss = trained(model, optimizer, x)
        group.update(lr=group["lr"] * 0.5)
        return loss, before, optimizer.param_groups[0]["lr"], group is optimizer.param_groups[0]

    return step, None


def read_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group = optimizer.param_groups[0]

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x * group["lr"])
        return loss, group.get("lr"), "lr" in group, len(group), sorted(key for key in group)

    return step, None


def by_a_callback(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group, kept = optimizer.param_groups[0], []  # type: Any, list[float]

    def step(number: int, x: Tensor) -> Any:
        group["lr"] = 0.05 / (number + 1)
        loss = trained(model, optimizer, x)
        graphopt.callback(lambda: kept.append(group["lr"]))
        group["lr"] *= 0.5
        return loss

    return step, kept


def new_rate(number: int, groups: Any) -> None:
    groups[0]["lr"] = 0.05 / (number + 1)


CASES = {
    "by an object": loop(by_an_object),
    "by a variable": loop(by_a_variable),
    "read alone": loop(read_alone, new_rate),
    "by a callback": loop(by_a_callback),
}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_group_is_the_same_one_by_any_name(make: Callable[[], Loop]) -> None:
    assert graphs_of(make) == 1


def behind(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    weights = model.weight.detach().numpy()

    def step(number: int, x: Tensor) -> Any:
        return trained(model, optimizer, x), float(weights.sum())

    return step, None


def in_front(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    weights = model.weight.detach().numpy()

    def step(number: int, x: Tensor) -> Any:
        before = float(weights.sum())
        return trained(model, optimizer, x), before

    return step, None


def test_an_array_in_the_memory_of_a_parameter_is_read_in_front_of_the_update_alone() -> None:
    graphs_of(loop(in_front), calls=3)
    with pytest.raises(CaptureError, match="in whose memory an array lies"):
        run(loop(behind), 3, compiled=True)
