"""Decisions and sizes by values of a rank's own, on two real ranks: bit for bit what
DistributedDataParallel gives, whichever rank takes which branch; and what ends on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool

Loss = Callable[[nn.Module, Tensor], Tensor]


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    """Each rank decides by its own loss."""
    loss = model(x).square().mean()
    return loss * 0.5 if loss.item() > 0.5 else loss


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """The second decision comes on one of the ways that the first one leads to."""
    loss = model(x).square().mean()
    if loss > 0.4:
        loss = loss * 0.5
        if x.sum() > 0:
            loss = loss + 1
    else:
        loss = loss * 2 if x.sum() > 1 else loss
    return loss


def checked(model: nn.Module, x: Tensor) -> Tensor:
    """A check that holds in every call."""
    loss = -torch.distributions.Normal(model(x), torch.ones(len(x), 2)).log_prob(x[:, :2]).mean()
    if not math.isfinite(loss.item()):
        raise ValueError("the loss is not finite")
    return loss


def agreed(model: nn.Module, x: Tensor) -> Tensor:
    """What a rank decides is sent, and all decide by that."""
    loss = model(x).square().mean()
    bad = torch.tensor([1.0 if loss.item() > 0.5 else 0.0])
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return loss * 0.1 if bad.item() else loss


def skipped(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def is_bad_anywhere(loss: Tensor) -> bool:
    """A vote of the program's own, for which each rank decides by its own loss."""
    bad = torch.tensor([0 if loss < 0.4 else 1])
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bool(bad.item())


def masked(model: nn.Module, x: Tensor) -> Tensor:
    """How many rows there are is another number on each rank, and 0 in one call."""
    chosen = model(x)[x[:, 0] > 0.8]
    return F.mse_loss(chosen, torch.zeros_like(chosen), reduction="sum")


def further(model: nn.Module, x: Tensor) -> Tensor:
    """One rank decides further, on a branch that the other one does not take."""
    outputs, chosen = model(x), x[:, 0] > 0.9
    loss = outputs.square().mean()
    if chosen.any():
        loss = loss + outputs[chosen].sum()
        loss = loss * 0.5 if loss > 1 else loss
    return loss


def counted(model: nn.Module, x: Tensor) -> Tensor:
    """An integer of a buffer, which all ranks get from rank 0, as MoCo's queue has it."""
    place = int(model.get_buffer("place"))
    with torch.no_grad():
        model.get_buffer("queue")[place : place + 2] = x[:2, 0]
        model.get_buffer("place")[0] = (place + 2) % 4
    return model(x).square().mean() + model.get_buffer("queue").clone().sum()


def statistics(model: nn.Module, x: Tensor) -> Tensor:
    """By a buffer that each rank computes from its own batches."""
    with torch.no_grad():
        model.get_buffer("queue")[0].mul_(0.5).add_(x.mean())
    loss = model(x).square().mean()
    return loss * 0.5 if model.get_buffer("queue").sum() > 0 else loss


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (scaled, twice, checked, agreed, skipped, masked, further, counted, statistics)
}


def trained(rank: int, name: str, compiled: bool) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    model.register_buffer("place", torch.zeros(1, dtype=torch.int64))
    model.register_buffer("queue", torch.zeros(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped = model if compiled else Transparent(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = LOSSES[name](wrapped, x)
        loss.backward()  # type: ignore[no-untyped-call]
        if name == "skipped" and is_bad_anywhere(loss):
            optimizer.zero_grad()
            return loss.detach()
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step) if compiled else step
    batches = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(rank))
    batches[5, :, 0] = -1.0
    losses = [run(x) for x in batches]
    if compiled:
        run.flush()
    return [*losses, *(tensor.detach().clone() for tensor in model.state_dict().values())]


class Transparent(DistributedDataParallel):
    """Gives the buffers of the model that it wraps."""

    def get_buffer(self, target: str) -> Tensor:
        return self.module.get_buffer(target)  # type: ignore[no-any-return]


def compare(rank: int, name: str) -> list[int]:
    expected, found = trained(rank, name, False), trained(rank, name, True)
    return [
        i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_each_rank_takes_its_branch(two_ranks: Pool, name: str) -> None:
    assert two_ranks.run(compare, name) == [[], []]


def one_raises(rank: int) -> str:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if not torch.isfinite(loss):
            raise ArithmeticError("the loss is not finite")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.ones(3, 4))
    step.flush()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(graphopt.GraphOptError if rank == 0 else ArithmeticError) as caught:
        step(torch.full((3, 4), math.nan if rank else 1.0))
    assert all(map(torch.equal, before, model.parameters()))
    step(torch.ones(3, 4))  # and all may go on
    return str(caught.value)


def test_a_branch_that_raises_ends_the_call_on_all_ranks(two_ranks: Pool) -> None:
    messages = two_ranks.run(one_raises)
    assert all("the loss is not finite" in message for message in messages)


def other_collectives(rank: int) -> str:
    model = nn.Linear(4, 2)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if x.sum() > 0:
            dist.all_reduce(x.clone())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        step(torch.full((3, 4), 1.0 - 2 * rank))
    return str(caught.value)


def test_branches_with_other_collectives_are_refused_on_all_ranks(two_ranks: Pool) -> None:
    assert all("rank 1 has other" in message for message in two_ranks.run(other_collectives))


def returning(rank: int, place: str, compiled: bool, signs: str) -> tuple[list[Tensor], list[int]]:
    """A step that returns early where the sign of a rank's own batch is negative.

    Returns:
        What calls give and leave, and how many graphs there are behind each.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net = model if compiled else DistributedDataParallel(model, find_unused_parameters=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        if place == "before the forward" and x.mean() < 0:
            return x.sum()
        loss: Tensor = net(x).square().mean()
        if place == "with the loss" and x.mean() < 0:
            return loss.detach()
        if place == "by two ways" and x.mean() < 0:
            return loss.detach() if x[0, 0] < x[1, 0] else 2 * loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
        if place == "before the update" and x.mean() < 0:
            return loss.detach()
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step) if compiled else step
    numbers = torch.Generator().manual_seed(rank)
    left, graphs = [], []
    for sign in signs:
        x = torch.randn(5, 4, generator=numbers)
        left += [
            run(x - x.mean() + (1 if sign == "+" else -1)),
            *map(torch.clone, net.parameters()),
        ]
        graphs.append(len(run.captures) if compiled else 0)
    return [tensor.detach() for tensor in left], graphs


def compare_returning(rank: int, place: str, signs: str) -> list[int]:
    found, graphs = returning(rank, place, True, signs)
    expected, _ = returning(rank, place, False, signs)
    assert all(map(torch.equal, expected, found)), place
    return graphs


@pytest.mark.parametrize("place", ["before the forward", "with the loss", "before the update"])
def test_all_ranks_return_early_by_values_of_their_own(two_ranks: Pool, place: str) -> None:
    """Each way is captured once; from then on the graphs take turns."""
    for graphs in two_ranks.run(compare_returning, place, "++-+-+-+"):
        assert graphs[-1] == graphs[4], graphs


def test_all_ranks_return_early_in_their_first_call(two_ranks: Pool) -> None:
    two_ranks.run(compare_returning, "with the loss", "-++-")


def test_all_ranks_return_early_by_different_ways(three_ranks: Pool) -> None:
    three_ranks.run(returning, "by two ways", True, "+--+-")


def one_returns(rank: int, call: int) -> list[str]:
    """Rank 1 leaves out the backward of one call, which DistributedDataParallel waits for."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if x.sum() < 0:
            return loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    said = []
    for number in range(3):
        try:
            step(torch.full((3, 4), -1.0 if (rank, number) == (1, call) else 1.0))
        except graphopt.SpmdMismatchError as error:
            said.append(f"{number}: {error}")
    return said


@pytest.mark.parametrize("call", [0, 1])
def test_a_backward_that_one_rank_leaves_out(two_ranks: Pool, call: int) -> None:
    """All ranks learn where they parted, and what to do, and go on with the next call."""
    for said in two_ranks.run(one_returns, call):
        assert [text[0] for text in said] == [str(call)], said
        assert "if x.sum() < 0:" in said[0], said
        assert "all_reduce(value) before the branch" in said[0], said
