"""Optimizer state of parameters that are in no group any more: a step that looks at all state is
refused, others do what eager code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError


class Momentum(torch.optim.Optimizer):
    """As people write them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = state.get("mean", 0.0) * 0.9 + parameter.grad
                parameter.sub_(state["mean"], alpha=group["lr"])


LOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "length": lambda optimizer: len(optimizer.state),
    "values": lambda optimizer: sum(float(each["mean"].sum()) for each in optimizer.state.values()),
    "keys": lambda optimizer: [key.dim() for key in optimizer.state],
    "changes": lambda optimizer: [each["mean"].mul_(0.5) for each in optimizer.state.values()][:0],
}


def pops(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def replaces(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model.weight = nn.Parameter(model.weight.detach() * 0.5)
    optimizer.param_groups[0]["params"][0] = model.weight


def adds(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[nn.Parameter(torch.ones(2))] = {"mean": torch.ones(2)}


def run(look: Any, change: Any, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Momentum(model.parameters())

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, None if look is None else look(optimizer)

    taken = graphopt.compile(step, pipeline="none") if compiled else step
    found = []
    for number in range(4):
        loss, looked = taken(torch.randn(4, 3))
        means = [each["mean"].tolist() for each in optimizer.state.values()]
        found.append((loss.item(), looked, model.weight.tolist(), means))
        if number == 1:
            change(model, optimizer)
    return found


CHANGES = [pops, replaces, adds]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_optimizer_finds_the_state_of_its_parameters(change: Any) -> None:
    assert run(None, change, True) == run(None, change, False)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_that_looks_at_all_state_is_refused(look: Any, change: Any) -> None:
    with pytest.raises(CaptureError, match="state of a parameter that is in no group"):
        run(look, change, True)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_looks_at_all_state_where_nothing_is_left_over(look: Any) -> None:
    def unchanged(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        """The program does nothing between two calls."""

    assert run(look, unchanged, True) == run(look, unchanged, False)
