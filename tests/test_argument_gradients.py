"""Arguments that require gradients, and keep them: points at which an equation is to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from twins import assert_same


def residual(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u = net(torch.cat([x, t], 1))
    u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t + u * u_x - 0.01 * u_xx).square().mean()


def equation(net: nn.Module, optimizer: Any, x: Tensor, t: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = residual(net, x, t)
    loss.backward()
    optimizer.step()
    return loss.detach()


def attacked(net: nn.Module, optimizer: Any, x: Tensor, t: Tensor) -> Tensor:
    """Reads the gradients of its arguments, which have those of calls before in them."""
    optimizer.zero_grad()
    loss = net(torch.cat([x, t], 1)).square().mean()
    loss.backward()
    assert x.grad is not None
    assert t.grad is not None
    optimizer.step()
    t.grad = None if t.grad is None else t.grad * 0.5
    return x.grad.sign()


def dropped(net: nn.Module, optimizer: Any, x: Tensor, t: Tensor) -> Tensor:
    x.grad = None
    if t.grad is not None:
        t.grad.zero_()
    return equation(net, optimizer, x, t)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(step: Callable[..., Any], compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run: Any = graphopt.compile(step) if compiled else step
    x, t = (torch.rand(6, 1, requires_grad=True) for _ in range(2))
    found: list[Any] = []
    for number in range(6):
        if number == 4:
            x.grad = None
        found.append(run(model, optimizer, x, t).clone())
        found += [None if v.grad is None else v.grad.clone() for v in (x, t)]
    if compiled:
        assert len(run.captures) <= 3
    return [found, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("step", [equation, attacked, dropped], ids=lambda step: step.__name__)
def test_gradients_of_arguments_accumulate(step: Callable[..., Any]) -> None:
    assert_same(trained(step, True), trained(step, False), step.__name__)


def test_the_same_tensor_twice() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = graphopt.compile(equation) if compiled else equation
        x = torch.rand(6, 1, requires_grad=True)
        losses = [step(model, optimizer, x, x).clone() for _ in range(3)]
        return [losses, x.grad]

    assert_same(run(True), run(False), "the same tensor")


class Equation:
    """Keeps its points as plain attributes."""

    def __init__(self) -> None:
        self.net = net()
        self.x, self.t = (torch.rand(6, 1, requires_grad=True) for _ in range(2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def step(self) -> Tensor:
        return equation(self.net, self.optimizer, self.x, self.t)


class EquationModule(nn.Module):
    """Keeps its points as attributes of a module, which are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.x, self.t = (torch.rand(6, 1, requires_grad=True) for _ in range(2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def step(self) -> Tensor:
        return equation(self.net, self.optimizer, self.x, self.t)


@pytest.mark.parametrize("kind", [Equation, EquationModule])
def test_gradients_of_attributes_accumulate(kind: Any) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        owner = kind()
        step: Any = graphopt.compile(owner.step) if compiled else owner.step
        losses = [step().clone() for _ in range(4)]
        parameters = [p.detach() for p in owner.net.parameters()]
        found.append([losses, owner.x.grad, owner.t.grad, parameters])
    assert_same(found[1], found[0], kind.__name__)


def test_an_argument_that_was_computed_is_refused() -> None:
    """A leaf before: the graph that holds for it knows nothing of where a gradient would go on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(equation)
    x, t = (torch.rand(6, 1, requires_grad=True) for _ in range(2))
    step(model, optimizer, x, t)
    t.grad = None
    with pytest.raises(CaptureError, match="computed with gradients outside"):
        step(model, optimizer, x * 1.0, t)
