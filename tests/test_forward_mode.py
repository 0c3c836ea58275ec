"""Differentiating forward: captured, or refused so that eager code goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacfwd, jacrev, jvp, linearize, vmap

import graphopt
from graphopt.ir.bits import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its own


def _tangent(model: nn.Module, x: Tensor) -> Tensor:
    value, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return value.mean() + tangent.square().mean()


def _linear(model: nn.Module, x: Tensor) -> Tensor:
    value, function = linearize(model, x)
    return value.mean() + function(torch.ones_like(x)).square().mean()


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacrev(model))(x).square().mean()


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacrev(jacrev(lambda row: model(row).sum())))(x).square().mean()


def _columns(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacfwd(model))(x).square().mean()


SCALE = torch.tensor([0.5, 2.0])  # of which the tangent is zero, and not there


def _scaled_columns(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacfwd(lambda row: model(row) * SCALE))(x).square().mean()


def _scaled_hessian(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(hessian(lambda row: (model(row) * SCALE).sum()))(x).square().mean()


def _trained(loss: Callable[[nn.Module, Tensor], Tensor], compiled: bool) -> list[Tensor]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(model, x)
        found.backward()
        optimizer.step()
        return found.detach()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    run: Any = graphopt.compile(step, pipeline="none") if compiled else step
    losses = [run(model, optimizer, torch.randn(5, 3)) for _ in range(3)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("loss", [_tangent, _linear, _rows, _twice, _columns])
def test_as_in_eager_code(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for mine, other in zip(_trained(loss, True), _trained(loss, False), strict=True):
        assert same_bits(mine, other)


def test_what_is_refused_leaves_eager_code_alone() -> None:
    before = [_trained(loss, False) for loss in (_linear, _scaled_hessian)]
    for loss in (_scaled_columns, _scaled_hessian, _scaled_columns):
        with pytest.raises(graphopt.CaptureError):
            _trained(loss, True)
    after = [_trained(loss, False) for loss in (_linear, _scaled_hessian)]
    for one, other in zip(before, after, strict=True):
        assert all(map(same_bits, one, other))
