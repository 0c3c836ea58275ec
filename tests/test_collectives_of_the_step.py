"""Collectives that a step calls itself, on two real ranks: bit for bit eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed import all_reduce

import graphopt
from gloo import Pool


def scattered(y: Tensor) -> Tensor:
    mine, first = torch.empty(3, 3), dist.get_rank() == 0
    dist.scatter(mine, list(y.detach().chunk(2)) if first else None, src=0)
    return (y.sum(0) * mine).mean()


def gathered(y: Tensor) -> Tensor:
    parts = [torch.empty(3) for _ in range(2)] if dist.get_rank() == 1 else None
    dist.gather(y.detach().sum(0), parts, dst=1)
    return y.mean() if parts is None else y.mean() * torch.stack(parts).sum()


def reduced(y: Tensor) -> Tensor:
    total = y.detach().sum()
    dist.reduce(total, dst=0)
    return y.mean() * total if dist.get_rank() == 0 else y.mean()


def reduced_in_parts(y: Tensor) -> Tensor:
    mine = torch.empty(3, 3)
    dist.reduce_scatter(mine, [part.contiguous() for part in y.detach().chunk(2)])
    dist.barrier()
    return (y.sum(0) * mine).mean()


def exchanged(y: Tensor) -> Tensor:
    received = torch.empty_like(y)
    work = dist.all_to_all_single(received, y.detach().contiguous(), async_op=True)
    work.wait()
    return (y * received).mean()


def of_a_constant(y: Tensor) -> Tensor:
    """Called by a name of this file; the tensor is known when the step is captured."""
    count = torch.tensor(float(3 + dist.get_rank()))
    all_reduce(count)
    return y.mean() / count


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each
    for each in (scattered, gathered, reduced, reduced_in_parts, exchanged, of_a_constant)
}


def trained(rank: int, name: str, compiled: bool) -> list[Tensor]:
    """Each rank updates its own parameters alone, and sends them, as ZeRO does."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::2], lr=0.1)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = COMPUTED[name](model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for index, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=index % 2)
        return loss.detach()

    run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
    batches = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(rank))
    losses = [run(x) for x in batches]
    if compiled:
        run.flush()
    return [*losses, *(parameter.detach().clone() for parameter in parameters)]


def compare(rank: int, name: str) -> int:
    expected, found = trained(rank, name, False), trained(rank, name, True)
    return sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_collective_gives_what_eager_gives(two_ranks: Pool, name: str) -> None:
    assert two_ranks.run(compare, name) == [0, 0]


def beside_averages(rank: int, compiled: bool) -> list[Tensor]:
    """Several tensors in one collective, in a step whose ranks compare what they launch."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: Any = model if compiled else nn.parallel.DistributedDataParallel(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = wrapped(x)
        hidden.square().sum().backward()
        sums = functional_collectives.all_reduce_coalesced(
            [hidden.detach(), x], "sum", dist.group.WORLD
        )
        optimizer.step()
        return torch.cat([each.flatten() for each in sums])

    run: Any = graphopt.compile(step) if compiled else step
    batches = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(rank))
    return [*map(run, batches), model.weight.detach().clone()]


def averages_are_alike(rank: int) -> bool:
    return all(map(torch.equal, beside_averages(rank, False), beside_averages(rank, True)))


def test_several_tensors_at_once_beside_averages(two_ranks: Pool) -> None:
    assert all(two_ranks.run(averages_are_alike))


class GatherLayer(torch.autograd.Function):
    """What all ranks have; the gradient of a rank's own part is its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, ...]:
        gathered = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, value)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        stacked = torch.stack(gradients)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


def layer(y: Tensor) -> Tensor:
    gathered: tuple[Tensor, ...] = GatherLayer.apply(y)  # type: ignore[no-untyped-call]
    return torch.cat(gathered).square().mean()


def negatives(y: Tensor) -> Tensor:
    keys = [torch.zeros_like(y) for _ in range(2)]
    dist.all_gather(keys, y.detach(), async_op=False)
    return (y @ torch.cat(keys).t()).logsumexp(1).mean()


def transposed(y: Tensor) -> Tensor:
    """Neither what is gathered nor what is written to is contiguous."""
    keys = [torch.zeros(y.shape[1], y.shape[0]).t() for _ in range(2)]
    dist.all_gather(keys, y.detach().t().contiguous().t())
    return (y * keys[0] + keys[1]).mean()


def waited_for(y: Tensor) -> Tensor:
    keys = [torch.zeros_like(y) for _ in range(2)]
    work = dist.all_gather(keys, y.detach(), async_op=True)
    loss = y.mean()
    work.wait()
    return loss * keys[1 - dist.get_rank()].sum()


def of_single_numbers(y: Tensor) -> Tensor:
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor(3 + dist.get_rank()))
    return y.mean() * torch.stack(counts).sum()


COMPUTED_OF_GATHERED_LISTS: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each for each in (layer, negatives, transposed, waited_for, of_single_numbers)
}


def trained_on_gathered_lists(rank: int, name: str, compiled: bool, averaged: bool) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = COMPUTED_OF_GATHERED_LISTS[name](model(x))
        loss.backward()
        if averaged:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss.detach()

    run: Callable[[Tensor], Tensor] = step
    if compiled:
        run = graphopt.compile(step, parallel=graphopt.Manual())
    batches = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(rank))
    losses = [run(x) for x in batches]
    if compiled:
        run.flush()  # type: ignore[attr-defined]
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def different_with_gathered_lists(rank: int, name: str, averaged: bool) -> int:
    expected = trained_on_gathered_lists(rank, name, False, averaged)
    found = trained_on_gathered_lists(rank, name, True, averaged)
    return sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("name", COMPUTED_OF_GATHERED_LISTS)
def test_a_gathered_list_is_what_eager_gathers(two_ranks: Pool, name: str, averaged: bool) -> None:
    assert two_ranks.run(different_with_gathered_lists, name, averaged) == [0, 0]


def refused(rank: int) -> str:
    def step(x: Tensor) -> Tensor:
        parts = [torch.zeros(2), torch.zeros(3)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step, parallel=graphopt.Manual())(torch.ones(2 + rank))
    return str(caught.value)


def test_parts_of_different_shapes_are_refused(two_ranks: Pool) -> None:
    for message in two_ranks.run(refused):
        assert "different shapes" in message and "test_collectives_of_the_step.py" in message


def refused_objects(rank: int) -> str:
    def step(x: Tensor) -> Tensor:
        parts: list[object] = [None, None]
        dist.all_gather_object(parts, 1)
        return x

    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step, parallel=graphopt.Manual())(torch.ones(2))
    return str(caught.value)


def test_what_sends_objects_is_refused_by_its_name(two_ranks: Pool) -> None:
    assert all("all_gather_object" in message for message in two_ranks.run(refused_objects))
