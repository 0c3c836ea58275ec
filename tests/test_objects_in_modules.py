"""Objects that a step makes of its tensors and numbers, and leaves in attributes of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import graphopt
from loops import Loop, graphs_of, trained


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value


def an_object(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = Kept([x * 2, {"loss": loss.item(), "inner": Kept(x)}])


def of_a_parameter(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = Kept(model.weight)
    return model.kept.value.sum().detach()


def in_a_list(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = [Kept(x), Kept(loss.detach())]


def a_function(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = lambda: x * 2


def a_distribution(model: Any, x: Tensor, loss: Tensor) -> Any:
    """As the actor of rsl_rl keeps the last one."""
    mean = model(x)
    model.kept = Normal(mean, mean.detach().abs() + 1)
    return model.kept.log_prob(torch.zeros(1)).mean().detach()


def of_kinds(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = Categorical(logits=x)
    return model.kept.entropy().mean()


def shown(value: Any) -> Any:
    if isinstance(value, (Kept, Normal, Categorical)):
        names = sorted(vars(value).items())
        return type(value).__name__, [(name, shown(each)) for name, each in names]
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, shown(each)) for key, each in items]
    return shown(value()) if callable(value) and not isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    "use", [an_object, of_a_parameter, in_a_list, a_function, a_distribution, of_kinds]
)
def test_each_call_leaves_an_object_of_its_own(use: Callable[..., Any]) -> None:
    def make() -> Loop:
        model = nn.Linear(4, 1)
        model.kept = None  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        former: list[Any] = []

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            return loss, use(model, x, loss)

        return Loop(step, lambda: shown(model.kept), lambda number: former.append(model.kept))

    assert graphs_of(make, 4) <= 2


def test_one_object_in_two_places_is_one_in_each_call() -> None:
    model = nn.Linear(4, 1)
    model.kept = model.other = None  # type: ignore[assignment]

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        model.kept = model.other = Kept(x)  # type: ignore[assignment]
        return model(x).sum().detach()

    found = []
    for number in range(2):
        x = torch.full((2, 4), float(number))
        step(x)
        found.append(model.kept)
        assert model.kept is model.other
        assert str(shown(model.kept)) == str(shown(Kept(x)))
    assert found[0] is not found[1]


class TwoLists(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.one: list[Any] = []
        self.other: list[Any] = []
        self.table: dict[str, Any] = {}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_list_in_two_places_is_one(elsewhere: bool) -> None:
    @graphopt.compile(pipeline="none")
    def step(model: TwoLists, x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        model.one = [loss.item(), 1.0]
        if elsewhere:
            model.table["other"] = model.one
        else:
            model.other = model.one

    model = TwoLists()
    for _ in range(2):
        step(model, torch.ones(2, 3))
        assert model.one is (model.table["other"] if elsewhere else model.other)
        assert len(model.one) == 2
