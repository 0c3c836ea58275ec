"""Where an assumption fails, the call begins anew as the graph of the other branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from test_decisions import left_by, same

Step = Callable[[nn.Module, Optimizer, Tensor], Any]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


class Net(nn.Module):
    """Has statistics that are updated, and draws, on both sides of what a step may ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).tanh(), 0.25))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().mean()


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and norm of a step whose update is left out where gradients are large."""
    loss = loss_of(model, x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 2:
        optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def by_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Skips the update."""
    return clipped(model, optimizer, x)[0]


def by_loss(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Skips the backward, or not: whichever is captured first."""
    loss = loss_of(model, x)
    if loss < 1:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def keeps_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """What both branches compute stays in `.grad`, and is returned."""
    optimizer.zero_grad()
    h = model(x) - x[:, :2]
    h.square().mean().backward()
    if h.abs().max() < 2:
        optimizer.step()
    return h


def draws_in_both(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Draws before, in each branch, and after both."""
    h = F.dropout(model(x), 0.5)
    h = h * torch.rand_like(h) if h.sum() > 0 else F.dropout(h, 0.25) + torch.randn_like(h)
    loss = F.dropout(h, 0.125).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def asks_three_times(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The second decision comes after the first in either branch, the third after an update of
    gradients."""
    h = model(x) - x[:, :2]
    h = h * 2 if h.sum() > 0 else h - 1
    loss = F.dropout(h, 0.25).square().mean()
    if loss > 1:
        loss = loss.sqrt()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 4:
        optimizer.step()
    return loss


STEPS: list[Step] = [by_norm, by_loss, keeps_gradients, draws_in_both, asks_three_times]


def batches(calls: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [0.2, 0.2, 3.0, 0.2, 3.0, 3.0, 0.2, 1.0, 3.0, 0.2]
    return [
        torch.randn(8, 4, generator=generator) * sizes[call % len(sizes)] for call in range(calls)
    ]


def trained(
    step: Step, kind: str, compiled: bool, calls: int = 24, **options: Any
) -> tuple[list[Any], list[bool]]:
    """What every call leaves, and whether an assumption of a graph has failed in it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    run: Any = graphopt.compile(step, **options) if compiled else step
    left: list[Any] = []
    failed = []
    for x in batches(calls):
        before = {entry: entry.failures for entry in run._entries} if compiled else {}
        result = run(model, optimizer, x)
        left += [result, *left_by(model, optimizer)]
        failed.append(any(entry.failures > was for entry, was in before.items()))
    return left, failed


@pytest.mark.covering(2)
@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_call_is_eager_s(step: Step, kind: str, pipeline: str) -> None:
    expected, _ = trained(step, kind, compiled=False)
    found, failed = trained(step, kind, compiled=True, pipeline=pipeline)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    assert any(failed[-8:])


# ---------------------------------------------------------------------------------- several ranks


def average_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return clipped(model, optimizer, x)[1]


def by_one_gradient(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Decides when all other gradients may still be under way between the ranks."""
    loss_of(model, x).backward()
    last = next(p for p in reversed(list(model.parameters())) if p.shape == (2,))
    assert last.grad is not None
    norm = last.grad.norm()
    if norm < 1:
        optimizer.step()
    optimizer.zero_grad()
    return norm


def by_all_losses(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """No rank updates where the loss of one is large."""
    loss = loss_of(model, x)
    loss.backward()
    large = (loss.detach() > 1).float()
    dist.all_reduce(large)
    if large == 0:
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_a_part(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """What is beside the part that is reduced is another number on each rank."""
    sums = x.sum(0)
    dist.all_reduce(sums[1:])
    if sums.sum() > 0:
        optimizer.zero_grad()
    return sums


def _on_rank(
    rank: int, step: Step, compiled: bool, pipeline: str, uneven: bool
) -> tuple[list[Any], list[bool]]:
    """What every call leaves on one rank; of one that is compiled, whether an assumption fails."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](model)
    run: Any = graphopt.compile(step, pipeline=pipeline) if compiled else step
    used = model if compiled else nn.parallel.DistributedDataParallel(model)
    left: list[Any] = []
    failures = []
    for call, x in enumerate(batches(20, seed=rank)):
        # Another length on one rank, for which it has graphs of its own.
        x = x[:5] if uneven and rank == 1 and call % 4 == 2 else x
        before = {entry: entry.failures for entry in run._entries} if compiled else {}
        result = run(used, optimizer, x)
        failures.append(any(entry.failures > was for entry, was in before.items()))
        left += [result, *left_by(model, optimizer)]
    return left, failures


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_ranks_decide_by_what_they_have_averaged(
    two_ranks: Pool, pipeline: str, uneven: bool
) -> None:
    expected = two_ranks.run(_on_rank, average_step, False, pipeline, uneven)
    found = two_ranks.run(_on_rank, average_step, True, pipeline, uneven)
    for (left, failures), (eager, _) in zip(found, expected, strict=True):
        assert len(left) == len(eager)
        assert all(map(same, left, eager))
        assert any(failures[-10:])


def test_ranks_decide_by_what_they_have_reduced_in_place(two_ranks: Pool) -> None:
    expected = two_ranks.run(_on_rank, by_all_losses, False, "default", True)
    found = two_ranks.run(_on_rank, by_all_losses, True, "default", True)
    for (left, failures), (eager, _) in zip(found, expected, strict=True):
        assert any(failures)
        assert len(left) == len(eager)
        assert all(map(same, left, eager))


def test_ranks_decide_by_a_value_of_which_a_part_is_reduced(two_ranks: Pool) -> None:
    expected = two_ranks.run(_on_rank, by_a_part, False, "default", False)
    found = two_ranks.run(_on_rank, by_a_part, True, "default", False)
    for (left, _), (eager, _) in zip(found, expected, strict=True):
        assert len(left) == len(eager)
        assert all(map(same, left, eager))


@pytest.mark.parametrize("pipeline", ["default", "none"])
def test_ranks_agree_where_collectives_may_be_under_way(two_ranks: Pool, pipeline: str) -> None:
    expected = two_ranks.run(_on_rank, by_one_gradient, False, pipeline, True)
    found = two_ranks.run(_on_rank, by_one_gradient, True, pipeline, True)
    for (left, failures), (eager, _) in zip(found, expected, strict=True):
        assert any(failures[-10:])
        assert len(left) == len(eager)
        assert all(map(same, left, eager))
