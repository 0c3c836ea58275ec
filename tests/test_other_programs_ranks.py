"""Ranks with communication of their own whose programs differ: each runs another graph, and all of
them launch alike. Bit for bit what eager code gives."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool
from test_decisions_beside_groups import RATE, batches, linear


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def decided_on_one(rank: int, compiled: bool) -> list[Tensor]:
    """One rank alone looks at its loss, so that its graph is another one."""
    model = nn.Sequential(linear(4, 3, 1), linear(3, 2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(x: Tensor, looks: bool) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        if looks and loss.item() > 200:
            loss = loss / 2
        average(model)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
    losses = [run(x, rank == 0) for x in batches(rank, 5)]
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def raised_on_one(rank: int, compiled: bool) -> list[Tensor]:
    """In the first calls one rank raises, when it has sent what others wait for, and goes on."""
    model = linear(4, 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)

    def step(x: Tensor, bad: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        average(model)
        if bad > 0:
            raise ValueError("too large")
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
    losses = []
    for i, x in enumerate(batches(rank, 5)):
        bad = torch.tensor(float(rank == 0 and i in (0, 1, 3)))
        if bad:
            with pytest.raises(ValueError, match="too large"):
                run(x, bad)
        else:
            losses.append(run(x, bad))
    if compiled:
        assert len(run.captures) == 1
    return [*losses, model.weight.detach().clone()]


def raised_alike(rank: int) -> bool:
    return all(map(torch.equal, raised_on_one(rank, False), raised_on_one(rank, True)))


def in_fewer_groups(rank: int, compiled: bool) -> list[Tensor]:
    """What a rank sends second depends on what it got first, on some ranks only."""
    group = dist.new_group([0, 1])
    model = nn.Sequential(linear(4, 3, 1), linear(3, 2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        first = loss.detach().clone()
        dist.all_reduce(first)
        second = first.clone() if rank < 2 else loss.detach() * 3
        if rank < 2:
            dist.all_reduce(second, group=group)
        dist.all_reduce(second)
        average(model)
        optimizer.step()
        return first - second  # type: ignore[no-any-return]

    run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
    totals = [run(x) for x in batches(rank, 4)]
    return [*totals, *(parameter.detach().clone() for parameter in model.parameters())]


def one_is_alike(rank: int) -> bool:
    return all(map(torch.equal, decided_on_one(rank, False), decided_on_one(rank, True)))


def fewer_are_alike(rank: int) -> bool:
    return all(map(torch.equal, in_fewer_groups(rank, False), in_fewer_groups(rank, True)))


def skips(rank: int, agrees: bool) -> tuple[bool, str]:
    """A batch is skipped for what it holds, the same on all ranks. Whether that is bit for bit as
    in eager code, and what was warned of."""
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("graphopt")

    def train(compiled: bool) -> list[Tensor]:
        model = linear(4, 2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            largest = loss.detach().clone()
            if agrees:
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            if largest > 200:
                return loss.detach()  # type: ignore[no-any-return]
            loss.backward()
            average(model)
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
        losses = [run(x) for x in batches(0, 6)]
        assert any(loss > 200 for loss in losses) and any(loss <= 200 for loss in losses)
        return [*losses, model.weight.detach().clone()]

    logger.addHandler(handler)
    try:
        return all(map(torch.equal, train(False), train(True))), warned.getvalue()
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("agrees", [False, True])
def test_what_is_launched_follows_from_a_batch(two_ranks: Pool, agrees: bool) -> None:
    for alike, warned in two_ranks.run(skips, agrees):
        assert alike and ("if largest > 200" in warned) == (not agrees)


def kept_on_one(rank: int, compiled: bool) -> list[Tensor]:
    """One rank keeps averages of the weights, and the smallest loss."""
    model = linear(4, 2, 1)
    wrapped: Any = model if compiled else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    average = [torch.zeros_like(model.weight)] if rank else []
    smooth = linear(4, 2, 5).requires_grad_(False) if rank else None
    best = torch.tensor(1e9, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(x).square().sum()
        loss.backward()
        optimizer.step()
        for tensor in average:
            tensor.lerp_(model.weight.detach(), 0.25)
        if smooth is not None:
            smooth.weight.mul_(0.5).add_(model.weight.detach())
        if loss > 200:
            loss = loss * 2
        if rank == 1:
            best.copy_(torch.minimum(best, loss.detach()))
        return loss.detach()  # type: ignore[no-any-return]

    run: Any = graphopt.compile(step) if compiled else step
    losses = [run(x) for x in batches(rank, 4)]
    kept = average if smooth is None else [*average, smooth.weight.clone()]
    return [*losses, *kept, best, model.weight.detach().clone()]


def kept_alike(rank: int) -> bool:
    return all(map(torch.equal, kept_on_one(rank, False), kept_on_one(rank, True)))


def test_one_rank_keeps_an_average(two_ranks: Pool) -> None:
    assert all(two_ranks.run(kept_alike))


def asked_on_one(rank: int) -> bool:
    """Whether one rank alone may take a decision, or use what all decide."""
    model = linear(4, 2, 1)

    def loss_of(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def alone(x: Tensor) -> Tensor:
        loss = loss_of(x)
        return loss * 2 if rank == 0 and loss > 200 else loss

    def together(x: Tensor) -> Tensor:
        loss = loss_of(x)
        return loss * 2 if loss > 200 and rank == 0 else loss

    steps, x = [graphopt.compile(alone), graphopt.compile(together)], batches(rank, 4)
    return all([run(each) for each in x] == [alone(each) for each in x] for run in steps)


def test_one_rank_alone_decides(two_ranks: Pool) -> None:
    assert all(two_ranks.run(asked_on_one))


def asked_twice(rank: int) -> bool:
    """One rank asks for two values, the other for one."""
    model = linear(4, 2, 1)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach() * (2 if loss > 0 or x.sum() > 0 else 1)  # type: ignore[no-any-return]

    x, factor = torch.full((3, 4), float(rank), dtype=torch.float64), 1 + rank
    return all(bool(step(x) == model(x).square().sum() * factor) for _ in range(2))


def test_ranks_take_another_number_of_decisions(two_ranks: Pool) -> None:
    assert all(two_ranks.run(asked_twice))


def test_one_rank_decides(two_ranks: Pool) -> None:
    assert all(two_ranks.run(one_is_alike))


def test_one_rank_raises_behind_what_it_has_sent(two_ranks: Pool) -> None:
    assert all(two_ranks.run(raised_alike))


def test_a_rank_that_is_in_fewer_groups(three_ranks: Pool) -> None:
    assert all(three_ranks.run(fewer_are_alike))


def compiled_on_one(rank: int, compiled: bool) -> list[Tensor]:
    """One rank alone runs its step as a graph: it asks the others for nothing."""
    model = nn.Sequential(linear(4, 3, 1), linear(3, 2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        average(model)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    options: dict[str, Any] = {"parallel": graphopt.Manual(), "pipeline": "auto"}
    run: Any = graphopt.compile(step, **options) if compiled and rank == 0 else step
    losses = [run(x) for x in batches(rank, 4)]
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def compiled_is_alike(rank: int) -> bool:
    return all(map(torch.equal, compiled_on_one(rank, False), compiled_on_one(rank, True)))


def test_one_rank_runs_a_graph(two_ranks: Pool) -> None:
    assert all(two_ranks.run(compiled_is_alike))
