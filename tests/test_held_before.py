"""What a step sets on modules, optimizers and other objects among its arguments, compared with what
they held before: each call does the same, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError


def parts() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def updated(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = model["second"](model["first"](x).tanh()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_an_object_may_look_like_an_optimizer() -> None:
    """Its own `step` and `state` are numbers and texts in which a step counts."""

    def run(compiled: Callable[..., Any]) -> list[Any]:
        model, optimizer = parts()
        held = SimpleNamespace(param_groups=optimizer.param_groups, step=0, state="new")

        @compiled
        def step(model: Any, optimizer: Any, held: Any, x: Tensor) -> Tensor:
            loss = updated(model, optimizer, x)
            held.step += 1
            held.state = "used"
            return loss * held.step

        found = [(step(model, optimizer, held, torch.ones(2, 3)), held.step) for _ in range(3)]
        return [*found, held.state]

    *eager, state = run(lambda fn: fn)
    *captured, left = run(graphopt.compile)
    for (one, count), (other, counted) in zip(eager, captured, strict=True):
        assert torch.equal(one, other) and count == counted
    assert state == left == "used"


def swap(model: Any, optimizer: Any) -> None:
    model["first"], model["second"] = model["second"], model["first"]


def put_another(model: Any, optimizer: Any) -> None:
    model["first"] = nn.Linear(3, 3)


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [(swap, "replaces"), (put_another, "replaces"), (add_group, "adds or removes a parameter")],
)
def test_another_module_or_group_is_refused(change: Callable[..., None], reason: str) -> None:
    model, optimizer = parts()

    @graphopt.compile
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = updated(model, optimizer, x)
        change(model, optimizer)
        return loss

    before = dict(model.items())
    with pytest.raises(CaptureError, match=reason):
        step(model, optimizer, torch.ones(2, 3))
    assert dict(model.items()) == before and len(optimizer.param_groups) == 1
