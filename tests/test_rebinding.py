"""`parameter.data = new` in a step, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

Step = Callable[..., Any]


def averaged(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * 0.1
    loss = F.cross_entropy(model(x) + average(x).detach(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def by_hand(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        parameter.data = (parameter.data - 0.1 * parameter.grad.data).clamp(-1, 1)
        parameter.data -= 0.01
    return loss


def updated_first(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = averaged(model, average, optimizer, x, y)
    model.weight.data = model.weight.data.clamp(-0.2, 0.2)  # the old storage has been updated
    return loss


def trained(step: Step, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = graphopt.compile(step) if compiled else step
    found, snapshots = [], []
    for _ in range(4):
        # What somebody holds of the old storage stays as it is.
        snapshots += [average.weight.data, model.weight.detach()]
        loss = run(model, average, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,)))
        found += [loss.clone(), *(each.clone() for each in snapshots)]
    if isinstance(run, graphopt.TrainStep):
        assert run._captured <= 2
    return [*found, *model.parameters(), *average.parameters()]


@pytest.mark.parametrize("step", [averaged, by_hand])
def test_equal_to_eager_whoever_holds_the_old_storage(step: Step) -> None:
    expected, got = trained(step, False), trained(step, True)
    assert all(map(torch.equal, got, expected))


def kept(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    new = model.weight.detach() * 2
    model.weight.data = new
    with torch.no_grad():
        model.weight.add_(1.0)  # `new` as well
    return (new + x.sum()).sum()


def shared(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    average.weight.data = model.weight.data
    return model(x).sum()


def cast(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    model.weight.data = model.weight.data.double()
    return x.sum()


def returned(model: Any, average: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    new = model.weight.detach() * 2
    model.weight.data = new
    return new


@pytest.mark.sliced(2)
@pytest.mark.parametrize("step", [kept, shared, cast, returned, updated_first])
def test_what_is_no_update_is_refused(step: Step) -> None:
    with pytest.raises(graphopt.CaptureError, match=r"\.data = "):
        trained(step, True)
