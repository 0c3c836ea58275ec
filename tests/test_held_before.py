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


def swap(model: Any) -> None:
    model["first"], model["second"] = model["second"], model["first"]


def tie(model: Any) -> None:
    model["second"] = model["first"]


def make(model: Any) -> None:
    model["between"] = nn.GELU()


def make_some(model: Any) -> None:
    model["between"] = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))


def alternate(model: Any) -> None:
    model["between"] = nn.Tanh() if isinstance(model["between"], nn.ReLU) else nn.ReLU()


def wrap(model: Any) -> None:
    if not isinstance(model["second"], nn.Sequential):
        model["second"] = nn.Sequential(model["second"], nn.Tanh())


def add(model: Any) -> None:
    model["another"] = nn.Tanh()


def with_hook(model: Any) -> None:
    model["between"] = nn.ReLU()
    model["between"].register_forward_hook(lambda module, args, result: 2 * result)


def described(model: Any) -> list[Any]:
    return [
        (name, type(module).__name__, module.training, getattr(module, "p", None))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("change", [swap, tie, make, make_some, alternate, wrap, add, with_hook])
def test_modules_are_replaced_in_each_call(change: Callable[[Any], None], first: bool) -> None:
    def run(compiled: Callable[..., Any]) -> tuple[list[Any], list[Tensor]]:
        torch.manual_seed(0)
        layers = {"first": nn.Linear(3, 3), "between": nn.ReLU(), "second": nn.Linear(3, 3)}
        model = nn.ModuleDict(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @compiled
        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            if first:
                change(model)
            hidden = model["between"](model["first"](x))
            loss = model["second"](hidden).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not first:
                change(model)
            return loss.detach()

        found: list[Any] = []
        tensors: list[Tensor] = []
        for index in range(5):
            tensors.append(step(model, optimizer, torch.full((2, 3), 1.0 + index)))
            found.append(described(model))
            if index == 2:
                model.eval()
        return found, [*tensors, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    eager, captured = run(lambda fn: fn), run(graphopt.compile)
    assert eager[0] == captured[0]
    assert all(map(torch.equal, eager[1], captured[1]))


def put_another(model: Any, optimizer: Any) -> None:
    model["first"] = nn.Linear(3, 3)


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def register(model: Any, optimizer: Any) -> None:
    model.register_parameter("scale", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put_another, "makes a module with tensors, 'first'"),
        (register, "registers parameters"),
        (add_group, "adds or removes a parameter group"),
    ],
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
