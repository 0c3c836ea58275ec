"""A step that reads the rates of a scheduler before it steps, or that never steps in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import graphopt

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 1e-4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 + epoch),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
}


def _run(compiled: bool, kind: str, rate: Any, read: str, inside: bool) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), rate)
    scheduler = SCHEDULERS[kind](optimizer)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        found = getattr(scheduler, read)()[0]
        if inside:
            scheduler.step()
        return found, found * 2, net(x).sum() * found

    called = graphopt.compile(step) if compiled else step
    results = []
    for _ in range(4):
        found, twice, value = called(torch.randn(2, 3))
        results.append((type(found), found, type(twice), twice, value.item()))
        if not inside:
            scheduler.step()
    return results


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("read", ["get_lr", "get_last_lr"])
@pytest.mark.parametrize("rate", [1, 0.01])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_call_reads_its_own(kind: str, rate: Any, read: str, inside: bool) -> None:
    eager = _run(False, kind, rate, read, inside)
    assert len({found for _, found, *_ in eager}) > 1
    assert _run(True, kind, rate, read, inside) == eager


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("read", ["get_lr", "get_last_lr"])
def test_rates_that_are_tensors_are_refused(read: str) -> None:
    with pytest.raises(graphopt.CaptureError, match="rates of a StepLR, which are not numbers"):
        _run(True, "step", torch.tensor(0.01), read, False)
