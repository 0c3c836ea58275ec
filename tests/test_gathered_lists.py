"""`torch.distributed.all_gather` into lists in a step, on two real ranks: bit for bit eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphopt
from gloo import Pool


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


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each for each in (layer, negatives, transposed, waited_for, of_single_numbers)
}


def trained(rank: int, name: str, compiled: bool, averaged: bool) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = COMPUTED[name](model(x))
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


def compare(rank: int, name: str, averaged: bool) -> int:
    expected = trained(rank, name, False, averaged)
    found = trained(rank, name, True, averaged)
    return sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_gathered_list_is_what_eager_gathers(two_ranks: Pool, name: str, averaged: bool) -> None:
    assert two_ranks.run(compare, name, averaged) == [0, 0]


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
        assert "different shapes" in message and "test_gathered_lists.py" in message


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
