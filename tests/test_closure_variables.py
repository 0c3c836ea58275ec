"""Variables of closures with tensors (`nonlocal hidden`): found and replaced by each call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Training = tuple[Callable[[Tensor], Any], Callable[[int], None], Callable[[], list[Any]]]


def averaging(model: nn.Module) -> Training:
    mean = torch.zeros(())

    def step(loss: Tensor) -> None:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss

    def between(call: int) -> None:
        nonlocal mean
        if call == 2:
            mean = torch.ones(2)

    return step, between, lambda: [mean]


def exchanging(model: nn.Module) -> Training:
    first, second = torch.zeros(()), torch.ones(())

    def step(loss: Tensor) -> Tensor:
        nonlocal first, second
        before, first, second = first, second, first + loss
        return before

    def between(call: int) -> None:
        nonlocal second
        if call == 2:
            second = first

    return step, between, lambda: [first, second]


def beginning(model: nn.Module) -> Training:
    hidden: Any = None

    def step(loss: Tensor) -> None:
        nonlocal hidden
        hidden = loss if hidden is None else hidden * loss

    def between(call: int) -> None:
        nonlocal hidden
        if call == 2:
            hidden = None
        elif call == 4:
            hidden = 2.0

    return step, between, lambda: [hidden]


def in_place(model: nn.Module) -> Training:
    mean = torch.zeros(())

    def change(value: Tensor) -> None:
        nonlocal mean
        mean = mean + value

    def step(loss: Tensor) -> Tensor:
        mean.mul_(0.9)
        change(loss)
        return mean

    return step, lambda call: None, lambda: [mean]


TRAININGS = {averaging: 2, exchanging: 2, beginning: 3, in_place: 1}


def run(make: Callable[[nn.Module], Training], compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, between, left = make(model)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), inner(loss.detach())

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for call, x in enumerate(torch.randn(6, 5, 4)):
        results = used(x)
        found.append([_plain(value) for value in (*results, *left())])
        between(call)
    return found, len(used.captures) if compiled else 0


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("make", TRAININGS)
def test_each_call_finds_the_tensor_of_the_last(make: Callable[[nn.Module], Training]) -> None:
    expected, _ = run(make, False)
    found, captures = run(make, True)
    assert found == expected
    assert captures <= TRAININGS[make]


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


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("change", [swap, tie, make, make_some, alternate, wrap, add, with_hook])
def test_another_submodule_is_refused(change: Callable[[Any], None], first: bool) -> None:
    layers = {"first": nn.Linear(3, 3), "between": nn.ReLU(), "second": nn.Linear(3, 3)}
    model = nn.ModuleDict(layers)

    @graphopt.compile
    def step(model: Any, x: Tensor) -> Any:
        if first:
            change(model)
        loss = model["second"](model["between"](model["first"](x))).square().mean()
        if not first:
            change(model)
        return loss

    with pytest.raises(CaptureError, match="puts another submodule into"):
        step(model, torch.ones(2, 3))
    assert dict(model.items()) == layers


def put_another(model: Any, optimizer: Any) -> None:
    model["first"] = nn.Linear(3, 3)


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def register(model: Any, optimizer: Any) -> None:
    model.register_parameter("scale", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put_another, "puts another submodule into 'first'"),
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
