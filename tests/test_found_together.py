"""What a step uses under a condition is found by one trace, which goes on where it meets an
optimizer that it has not been given; and nothing of that optimizer is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt


class Counting(Optimizer):
    """Counts in an attribute, in its group and in its state, and needs a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0
        self.state["all"] = {"seen": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["all"]["seen"] += 1
        for group in self.param_groups:
            group["k"] += 1
            first = group["params"][0]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])
            first.mul_(0.999)


class Average:
    """As people keep it: a copy of the model, by its `state_dict`, and a count."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.updates = copy.deepcopy(model).eval(), 0
        for p in self.model.parameters():
            p.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        now = model.state_dict()
        for key, value in self.model.state_dict().items():
            if value.dtype.is_floating_point:
                value *= 0.9
                value += 0.1 * now[key].detach()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "counting": Counting,
}


class Loop:
    def __init__(self, kind: str, average: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.average = Average(self.model) if average else None

    def step(self, x: Tensor, number: int) -> Tensor:
        loss = self.model(x).square().mean()
        (loss / 2).backward()
        if number % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average:
                self.average.update(self.model)
        return loss.detach()

    def left(self) -> list[Any]:
        found: list[Any] = [*self.model.state_dict().values()]
        if self.average:
            found += [*self.average.model.state_dict().values(), self.average.updates]
        found += [group["lr"] for group in self.optimizer.param_groups]
        found += [group.get("k") for group in self.optimizer.param_groups]
        for state in self.optimizer.state.values():
            found += [(key, value) for key, value in state.items()]
        return [*found, getattr(self.optimizer, "calls", None)]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("gradients", [False, True])
def test_as_in_eager_code(kind: str, gradients: bool) -> None:
    captured, eager = Loop(kind), Loop(kind)
    step = graphopt.compile(captured.step)
    if gradients:  # real ones, before anything is captured
        for loop in (captured, eager):
            loop.model(torch.ones(3, 4)).sum().backward()
    for number in range(6):
        x = torch.rand(5, 4)
        assert torch.equal(step(x, number), eager.step(x, number))
        assert alike(captured.left(), eager.left())


def test_one_trace_finds_all(traces: list[int]) -> None:
    step = graphopt.compile(Loop("adamw").step)
    step(torch.rand(5, 4), 0)
    # The one that finds them, the step itself, and once more to see that it is repeated.
    assert traces[0] == 3


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_refused_capture_leaves_the_optimizer_alone(kind: str) -> None:
    loop, reference = Loop(kind, average=False), Loop(kind, average=False)
    loop.model(torch.ones(3, 4)).sum().backward()
    reference.model(torch.ones(3, 4)).sum().backward()
    groups = [(group, group["params"]) for group in loop.optimizer.param_groups]

    def step(x: Tensor) -> Tensor:
        loss = loop.step(x, 0)
        torch.manual_seed(7)  # which no graph can do
        return loss

    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(torch.rand(5, 4))
    assert alike(loop.left(), reference.left())
    for (group, params), now in zip(groups, loop.optimizer.param_groups, strict=True):
        assert now is group
        assert len(now["params"]) == len(params) > 0
        assert all(a is b for a, b in zip(now["params"], params, strict=True))
