"""Optimizers, and schedulers of theirs, that a step makes: traced as any other code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of, trained

Make = Callable[[Any], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """One of the program's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter.sub_(mean, alpha=group["lr"] / state["count"])


MADE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "own": lambda p: Own(p, lr=0.1),
}


def of_a_perturbation(make: Make) -> Loop:
    """TRADES: an adversarial example is optimized within the step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int, x: Tensor) -> Any:
        delta = torch.zeros_like(x, requires_grad=True)
        inner = make([delta])
        for _ in range(3):
            trained(lambda value: model(value + delta), inner, x)  # type: ignore[arg-type]
        return trained(model, optimizer, x + delta.detach()), delta.detach()

    return Loop(step, lambda: [model, optimizer.state_dict()])


def of_the_model(make: Make) -> Loop:
    """Federated averaging: each round begins with a new optimizer."""
    model = nn.Linear(4, 2)

    def step(number: int, x: Tensor) -> Any:
        optimizer = make(model.parameters())
        return [trained(model, optimizer, x) for _ in range(2)]

    return Loop(step, lambda: [model])


def of_a_copy(make: Make) -> Loop:
    """Reptile: a copy of the model is trained, and the model goes a part of the way."""
    model = nn.Linear(4, 2)

    def step(number: int, x: Tensor) -> Any:
        fast = copy.deepcopy(model)
        optimizer = make(fast.parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        losses = [trained(fast, optimizer, x) for _ in range(2)]
        with torch.no_grad():
            for slow, new in zip(model.parameters(), fast.parameters(), strict=True):
                slow.add_(new - slow, alpha=0.5)
        return losses

    return Loop(step, lambda: [model])


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("use", [of_a_perturbation, of_the_model, of_a_copy])
def test_optimizers_do_what_they_do_in_eager_code(use: Callable[[Make], Loop], name: str) -> None:
    assert graphs_of(lambda: use(MADE[name]), 4) <= 2


def scheduled() -> Loop:
    """The schedulers of such an optimizer are traced as well."""
    model = nn.Linear(4, 2)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: Tensor) -> Any:
        fast = copy.deepcopy(model)
        optimizer, rates = torch.optim.Adam(fast.parameters(), lr=0.1), []
        inner = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
        for _ in range(3):
            trained(fast, optimizer, x)
            inner.step()
            rates += [inner.get_last_lr()[0], optimizer.param_groups[0]["lr"]]
        loss = trained(model, outer, x + fast(x).mean().detach())
        return loss, rates

    return Loop(step, lambda: [model, outer.param_groups[0]["lr"]])


def closure() -> Loop:
    model = nn.Linear(4, 2)

    def step(number: int, x: Tensor) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def evaluated() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(evaluated)

    return Loop(step, lambda: [model])


@pytest.mark.parametrize("make", [scheduled, closure])
def test_what_is_made_beside_them(make: Callable[[], Loop]) -> None:
    assert graphs_of(make, 5) <= 2


def test_one_that_is_kept_is_refused() -> None:
    model, trainer = nn.Linear(4, 2), SimpleNamespace(optimizer=None)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        trainer.optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return trained(model, trainer.optimizer, x)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(graphopt.CaptureError, match=r"puts a Adam .* into trainer\.optimizer"):
        step(torch.ones(3, 4))
    assert trainer.optimizer is None
    assert all(map(torch.equal, before, model.parameters()))
