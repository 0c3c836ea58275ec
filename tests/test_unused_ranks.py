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
from graphopt.ranks.unused import UnusedParameters


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


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        x = self.first(x)
        loss: Tensor = self.last(self.spare(x) + x if spare else x).square().mean()
        return loss


class Halves(nn.Module):
    """One model, of which each backward trains a half."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Half(), Half()])

    def forward(self, x: Tensor, number: int, spare: bool) -> Tensor:
        loss: Tensor = self.halves[number](x, spare)
        return loss


Spares = list[tuple[bool, bool]]
"""For each call, whether the first and the second half use their spare layer."""

ROUNDS: dict[str, tuple[Spares, Spares]] = {
    "always": ([(True, True)] * 4, [(True, True)] * 4),
    "in_turns": (
        [(True, False), (False, True), (True, True), (False, False)],
        [(False, True), (True, False), (True, True), (False, False)],
    ),
    "one_rank": (
        [(False, False), (False, True), (True, True), (True, True)],
        [(True, True), (True, False), (True, True), (False, True)],
    ),
    "late": (
        [(True, True), (True, True), (False, False), (True, False)],
        [(True, True), (False, False), (False, True), (False, False)],
    ),
}


Order = tuple[int, ...]
"""The halves that a step trains one after the other."""

ORDERS: dict[str, tuple[list[Order], list[Order]]] = {
    "alike": ([(0, 1)] * 4, [(0, 1)] * 4),
    "turned": ([(0, 1)] * 4, [(0, 1), (1, 0), (0, 1), (1, 0)]),
    "one_twice": ([(0, 1), (0, 1), (0, 0), (1, 0)], [(0, 1), (1, 1), (0, 1), (0, 0)]),
}


class Rounds:
    """Trains two halves one after the other, and looks at the gradients of each.

    Args:
        models: how many models the halves are.
        zeroing: how the gradients of the call before go: to None, to zero, or only after the call.
    """

    def __init__(self, models: int, zeroing: str, ddp: bool) -> None:
        torch.manual_seed(1)
        whole = Halves()
        self.nets: list[Any] = [whole] if models == 1 else list(whole.halves)
        self.halves = list(whole.halves)
        self.optimizers = [OPTIMIZERS["momentum"](half.parameters()) for half in self.halves]
        self.zeroing = zeroing
        if ddp:
            self.nets = [
                DistributedDataParallel(net, find_unused_parameters=True) for net in self.nets
            ]

    def step(
        self, nets: Any, optimizers: Any, x: Tensor, spares: tuple[bool, bool], order: Order
    ) -> Any:
        found = []
        for number in order:
            optimizer, spare = optimizers[number], spares[number]
            if self.zeroing != "behind":
                optimizer.zero_grad(set_to_none=self.zeroing == "to_none")
            loss = self.backward(number, x, spare)
            found += [self.halves[number].last.weight.grad.clone(), loss]
            optimizer.step()
        if self.zeroing == "behind":
            for optimizer in optimizers:
                optimizer.zero_grad()
        return found

    def backward(self, number: int, x: Tensor, spare: bool) -> Tensor:
        nets = self.nets
        loss = nets[0](x, number, spare) if len(nets) == 1 else nets[number](x, spare)
        loss.backward()
        return loss.detach()

    def left(self) -> list[Tensor]:
        pairs = zip(self.halves, self.optimizers, strict=True)
        return [each for half, optimizer in pairs for each in left(half, optimizer)]


def rounds_differ(
    rank: int, models: int, zeroing: str, spares: str, apart: bool, order: str = "alike"
) -> list[int]:
    """The calls that differ from DistributedDataParallel.

    Args:
        apart: before the third call, each rank makes gradients of the second half by itself.
    """
    eager, captured = (Rounds(models, zeroing, ddp) for ddp in (True, False))
    step: Any = graphopt.compile(captured.step, pipeline="none")
    numbers = torch.Generator().manual_seed(rank)
    found = []
    for call, given in enumerate(zip(ROUNDS[spares][rank], ORDERS[order][rank], strict=True)):
        x = torch.randn(4, 3, generator=numbers)
        if apart and call == 2:
            with eager.nets[-1].no_sync():
                eager.backward(1, x, True)
            captured.backward(1, x, True)
        expected = [*eager.step(eager.nets, eager.optimizers, x, *given), *eager.left()]
        actual = [*step(captured.nets, captured.optimizers, x, *given), *captured.left()]
        if not all(map(torch.equal, expected, actual)):
            found.append(call)
    return found


@pytest.mark.parametrize("models", [1, 2])
def test_each_round_of_a_step_asks_for_itself(two_ranks: Pool, models: int) -> None:
    assert two_ranks.run(rounds_differ, models, "to_none", "one_rank", False) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("spares", ROUNDS)
@pytest.mark.parametrize("zeroing", ["to_none", "to_zero", "behind"])
@pytest.mark.parametrize("models", [1, 2])
def test_rounds_of_a_step(
    two_ranks: Pool, models: int, zeroing: str, spares: str, apart: bool
) -> None:
    assert two_ranks.run(rounds_differ, models, zeroing, spares, apart) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("zeroing", ["to_none", "to_zero", "behind"])
@pytest.mark.parametrize("order", ["turned", "one_twice"])
def test_rounds_in_another_order(two_ranks: Pool, order: str, zeroing: str) -> None:
    assert two_ranks.run(rounds_differ, 1, zeroing, "always", False, order) == [[], []]


def said_in_a_call_that_failed(rank: int) -> list[tuple[int, ...]]:
    """What the next call hears, of the same agreement and of another one of the same name."""
    found = []
    one, other = (UnusedParameters(dist.group.WORLD, "said in a failed call") for _ in range(2))
    for last, following in ((one, one), (one, other), (other, one)):
        last.say([0, 1])  # and the call fails: it is not over
        dist.barrier()
        following.say([])
        dist.barrier()
        found.append(following.used_anywhere([0, 1]))
        following.say([1])
        dist.barrier()
        found.append(following.used_anywhere([0, 1]))
        dist.barrier()
        following.over()
    return found


def test_what_a_failed_call_said_is_not_heard_in_the_next(two_ranks: Pool) -> None:
    assert two_ranks.run(said_in_a_call_that_failed) == [[(1, 1), (1, 0)] * 3] * 2
