"""Parameters that only some calls use, on several real ranks: bit for bit what
DistributedDataParallel(find_unused_parameters=True) makes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphopt
from gloo import Pool, pool


class Blocks(nn.Module):
    """As many blocks as a call says; a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: Tensor, depth: int, task: int) -> Tensor:
        for block in self.blocks[:depth]:
            x = x + torch.tanh(block(x))
        head: Tensor = self.heads[task](x)
        return head


Schedule = list[list[tuple[int, int]]]
"""Of each rank, depth and task of each call."""

SCHEDULES: dict[str, Schedule] = {
    "alike": [[(3, 0), (1, 0), (2, 0), (1, 0), (3, 0), (1, 0)]] * 3,
    "one_rank": [[(3, 0)] * 6, [(3, 0), (1, 0), (3, 0), (2, 0), (1, 0), (3, 0)], [(3, 0)] * 6],
    "apart": [
        [(3, 0), (1, 0), (2, 0), (1, 0), (1, 0), (0, 0), (1, 0)],
        [(3, 0), (2, 0), (1, 0), (1, 0), (3, 0), (0, 0), (1, 0)],
        [(3, 0), (1, 0), (1, 0), (1, 0), (1, 0), (0, 0), (2, 0)],
    ],
    "never_all": [
        [(1, 0), (2, 0), (1, 0), (2, 0)],
        [(2, 0), (1, 0), (1, 0), (2, 0)],
        [(1, 0), (1, 0), (1, 0), (2, 0)],
    ],
    "tasks": [
        [(1, 0), (1, 1), (1, 0), (1, 1), (1, 0)],
        [(1, 1), (1, 0), (1, 0), (1, 1), (1, 0)],
        [(1, 0), (1, 1), (1, 0), (1, 1), (1, 1)],
    ],
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.05
    ),
}

Train = Callable[[Tensor, int, int], Tensor]


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    """Goes on only where the norm of all gradients is finite, and zeroes them in place."""

    def step(x: Tensor, depth: int, task: int) -> Tensor:
        loss = F.cross_entropy(model(x, depth, task), torch.zeros(len(x), dtype=torch.int64))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    def step(x: Tensor, depth: int, task: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, depth, task), torch.zeros(len(x), dtype=torch.int64))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    """Decides in each call, by a count that all ranks have, whether the average begins."""
    trained = model.module if isinstance(model, DistributedDataParallel) else model
    average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = plain(model, optimizer)

    def averaging(x: Tensor, depth: int, task: int) -> Tensor:
        loss = step(x, depth, task)
        average.update_parameters(trained)
        return loss + sum(p.detach().sum() for p in average.parameters())

    return averaging


STEPS = {"plain": plain, "clipped": clipped, "averaged": averaged}


def trained(
    rank: int, ranks: int, schedule: str, step: str, optimizer: str, compiled: bool
) -> list[Tensor]:
    torch.manual_seed(1)
    model = Blocks()
    reference = DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=1e-6 if ranks > 2 else 25
    )
    update = OPTIMIZERS[optimizer](model.parameters())
    run: Any = STEPS[step](model if compiled else reference, update)
    if compiled:
        run = graphopt.compile(run, pipeline="none" if ranks > 2 else "default")
    numbers = torch.Generator().manual_seed(rank)
    losses = [
        run(torch.randn(3, 4, generator=numbers), depth, task)
        for depth, task in SCHEDULES[schedule][rank]
    ]
    if compiled:
        run.flush()
    return [*losses, *left(model, update)]


def left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, gradients and optimizer state; an empty tensor where there is none."""
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found += [parameter.detach(), torch.empty(0) if gradient is None else gradient]
        found += [torch.as_tensor(value) for value in optimizer.state[parameter].values()]
        found.append(torch.tensor(len(optimizer.state[parameter])))
    return [tensor.clone() for tensor in found]


def compare(rank: int, *args: Any) -> list[int]:
    expected, found = trained(rank, *args, False), trained(rank, *args, True)
    assert len(expected) == len(found)
    return [
        i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)
    ]


@pytest.mark.parametrize("schedule", ["one_rank", "tasks"])
def test_as_ddp_on_two_ranks(two_ranks: Pool, schedule: str) -> None:
    assert two_ranks.run(compare, 2, schedule, "plain", "adamw") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["alike", "apart", "never_all"])
def test_as_ddp_with_adamw(two_ranks: Pool, schedule: str) -> None:
    assert two_ranks.run(compare, 2, schedule, "plain", "adamw") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_ddp_with_momentum(two_ranks: Pool, schedule: str) -> None:
    assert two_ranks.run(compare, 2, schedule, "plain", "momentum") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("step", ["clipped", "averaged"])
@pytest.mark.parametrize("schedule", ["alike", "apart"])
def test_as_ddp_with_a_decision_behind(two_ranks: Pool, schedule: str, step: str) -> None:
    assert two_ranks.run(compare, 2, schedule, step, "adamw") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["apart", "never_all", "tasks"])
def test_as_ddp_on_three_ranks(three_ranks: Pool, schedule: str) -> None:
    assert three_ranks.run(compare, 3, schedule, "plain", "adamw") == [[], [], []]


def in_more_groups(rank: int, *args: Any) -> list[int]:
    """Some ranks belong to more groups than others, as with tensor parallelism beside."""
    for ranks in ([0, 1], [0]):
        dist.new_group(ranks)
    return compare(rank, *args)


def test_ranks_may_belong_to_different_numbers_of_groups() -> None:
    with pool(3) as ranks:  # in which groups stay
        assert ranks.run(in_more_groups, 3, "apart", "plain", "adamw") == [[], [], []]


APART: Schedule = [
    [(3, 0), (1, 0), (2, 0), (1, 0), (1, 0), (0, 0), (1, 0), (0, 0)],
    [(3, 0), (2, 0), (1, 0), (1, 0), (3, 0), (0, 0), (0, 0), (1, 0)],
]


def accumulated(rank: int, compiled: bool) -> list[Tensor]:
    """Gradients of two calls in one update; those of the last calls are left."""
    torch.manual_seed(1)
    model = Blocks()
    reference = DistributedDataParallel(model, find_unused_parameters=True)
    update = OPTIMIZERS["adamw"](model.parameters())

    def backward(x: Tensor, depth: int, task: int, ends: bool) -> Tensor:
        net = model if compiled else reference
        loss = F.cross_entropy(net(x, depth, task), torch.zeros(len(x), dtype=torch.int64))
        loss.backward()
        if ends:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            update.step()
            update.zero_grad()
        return loss.detach()

    run: Any = graphopt.compile(backward) if compiled else backward
    numbers = torch.Generator().manual_seed(rank)
    found = []
    for call, (depth, task) in enumerate(APART[rank]):
        alone = run.no_sync() if compiled else reference.no_sync()
        x = torch.randn(3, 4, generator=numbers)
        with nullcontext() if call % 2 else alone:
            found += [run(x, depth, task, call in (1, 3, 5)), *left(model, update)]
    return found


def differing(rank: int) -> list[int]:
    pairs = zip(accumulated(rank, False), accumulated(rank, True), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.full
def test_gradients_of_several_calls_as_ddp(two_ranks: Pool) -> None:
    assert two_ranks.run(differing) == [[], []]
