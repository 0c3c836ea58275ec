"""Decisions and sizes by value beside communication of a step's own, over groups of all kinds: what
was launched before a decision is not launched again. Bit for bit what eager code gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool

Group = dist.ProcessGroup
RATE = 2.0**-12


def batches(rank: int, count: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, (count, 3, 4), generator=generator).double()


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-2, 3, (outputs, inputs), generator=generator))
    return layer


class SumGradients(torch.autograd.Function):
    """Where layers begin of which each rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumParts(torch.autograd.Function):
    """Where they end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Parts(nn.Module):
    """Two layers, of which each rank of a group has a part."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, rank = group, group.rank()
        self.first, self.second = linear(4, 3, 10 + rank), linear(3, 2, 20 + rank)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(SumGradients.apply(x, self.group)))
        return SumParts.apply(self.second(hidden), self.group)  # type: ignore[no-any-return]


Decide = Callable[[Parts, Tensor], Tensor]


def by_loss(model: Parts, loss: Tensor) -> Tensor:
    """Ranks that have parts of the same layers decide alike, others do not."""
    loss = loss / 2 if loss.item() > 200 else loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def by_gradients(model: Parts, loss: Tensor) -> Tensor:
    """Each rank decides by gradients of its parts."""
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        assert parameter.grad is not None
        if parameter.grad.abs().max() > 40:
            parameter.grad.mul_(0.5)
    return loss


def by_weights(model: Parts, loss: Tensor) -> Tensor:
    """Weights are other ones on each rank that has parts of the same layers."""
    loss.backward()  # type: ignore[no-untyped-call]
    if model.second.weight.abs().max() > 1:
        with torch.no_grad():
            model.second.weight.mul_(0.5)
    return loss


def by_rows(model: Parts, loss: Tensor) -> Tensor:
    """How many rows there are is another number on each rank, and 0 on some."""
    rows = model.first.weight[model.first.weight[:, 0] > 0.5]
    loss = loss + rows.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


DECISIONS: dict[str, Decide] = {
    each.__name__: each for each in (by_loss, by_gradients, by_weights, by_rows)
}


def trained(
    model: Parts, decide: Decide, x: Tensor, compiled: bool, group: Group | None
) -> Iterator[Tensor]:
    """Results and state of a training; with averaged gradients where there is a group."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    kind = graphopt.Manual() if group is None else graphopt.DataParallel(group=group)
    wrapped: Any = model
    if not compiled and group is not None:
        wrapped = DistributedDataParallel(model, process_group=group)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = decide(model, wrapped(x).square().sum())
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step, parallel=kind) if compiled else step
    for batch in x:
        yield run(batch)
    if compiled:
        run.flush()
    yield from (parameter.detach().clone() for parameter in model.parameters())


def by_hand(rank: int, name: str) -> bool:
    group, decide = dist.group.WORLD, DECISIONS[name]
    assert group is not None
    runs = [trained(Parts(group), decide, batches(5), how, None) for how in (False, True)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", DECISIONS)
def test_communication_by_hand(two_ranks: Pool, name: str) -> None:
    assert all(two_ranks.run(by_hand, name))


def beside_averages(rank: int, name: str) -> bool:
    averaging = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    x, decide = batches(rank // 2), DECISIONS[name]
    runs = [trained(Parts(parts), decide, x, how, averaging) for how in (False, True)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", DECISIONS)
def test_beside_averages_over_other_groups(four_ranks: Pool, name: str) -> None:
    assert all(four_ranks.run(beside_averages, name))


def queued(rank: int, compiled: bool) -> list[Tensor]:
    """Keys of all ranks go into a queue, at a place that a buffer holds, as MoCo's do."""
    model = linear(4, 2, 1)
    model.register_buffer("queue", torch.zeros(12, 2, dtype=torch.float64))
    model.register_buffer("place", torch.zeros(1, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        keys = model(x)
        loss = (keys @ model.get_buffer("queue").clone().T).square().sum() + keys.square().sum()
        loss.backward()
        assert model.weight.grad is not None
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        with torch.no_grad():
            parts = [torch.empty_like(keys) for _ in range(2)]
            dist.all_gather(parts, keys.detach())
            place = int(model.get_buffer("place"))
            model.get_buffer("queue")[place : place + 6] = torch.cat(parts)
            model.get_buffer("place")[0] = (place + 6) % 12
        return loss.detach()  # type: ignore[no-any-return]

    run: Any = graphopt.compile(step, parallel=graphopt.Manual()) if compiled else step
    losses = [run(x) for x in batches(rank, 4)]
    return [*losses, *(tensor.clone() for tensor in model.state_dict().values())]


def queues_alike(rank: int) -> bool:
    return all(map(torch.equal, queued(rank, False), queued(rank, True)))


def test_a_place_in_a_queue(two_ranks: Pool) -> None:
    assert all(two_ranks.run(queues_alike))


def accumulated(rank: int, compiled: bool) -> list[Tensor]:
    """Each rank decides in calls in which nobody averages anything."""
    model = linear(4, 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    wrapped: Any = model if compiled else DistributedDataParallel(model)

    def add(x: Tensor) -> Tensor:
        loss = wrapped(x).square().sum()
        loss = loss / 4 if loss.item() > 60 else loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def step(x: Tensor) -> Tensor:
        loss = add(x)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    adds: Any = graphopt.compile(add) if compiled else add
    steps: Any = graphopt.compile(step) if compiled else step
    losses = []
    for i, x in enumerate(batches(rank, 9)):
        if i % 3 == 2:
            losses.append(steps(x))
        else:
            with adds.no_sync() if compiled else wrapped.no_sync():
                losses.append(adds(x))
    return [*losses, model.weight.detach().clone()]


def accumulated_alike(rank: int) -> bool:
    return all(map(torch.equal, accumulated(rank, False), accumulated(rank, True)))


def test_calls_that_average_nothing(two_ranks: Pool) -> None:
    assert all(two_ranks.run(accumulated_alike))


def both_sums(rank: int) -> list[list[Tensor]]:
    """A sum of all ranks decides, and the answer that was guessed at capture is wrong."""
    model = linear(4, 2, 1)

    def step(x: Tensor) -> Tensor:
        total = model(x).sum().detach()
        dist.all_reduce(total)
        return total * 2 if total > 1000 else total

    run = graphopt.compile(step, parallel=graphopt.Manual())
    return [[each(x) for x in batches(rank, 3)] for each in (step, run)]


def test_a_guess_is_taken_back(two_ranks: Pool) -> None:
    for eager, captured in two_ranks.run(both_sums):
        assert all(map(torch.equal, eager, captured))


def not_run_eagerly(rank: int) -> str:
    """The other branch cannot be captured, when others have joined what was launched."""
    model = linear(4, 2, 1)

    def step(x: Tensor) -> Tensor:
        total = model(x).sum().detach()
        dist.all_reduce(total)
        if total < 0:
            max([total], key=float)
        return total

    run = graphopt.compile(step, parallel=graphopt.Manual(), fallback="eager")
    with torch.no_grad():
        model.weight.fill_(1.0)
    run(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(graphopt.CaptureError) as caught:
        run(-torch.ones(3, 4, dtype=torch.float64))
    return str(caught.value)


def test_what_others_have_joined_does_not_run_again_eagerly(two_ranks: Pool) -> None:
    assert all("key=float" in message for message in two_ranks.run(not_run_eagerly))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(linear(4, 2, seed) for seed in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)  # type: ignore[no-any-return]


def in_a_part(rank: int) -> bool:
    """Parameters that go unused, in a group of some ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return True

    def run(compiled: bool) -> list[Tensor]:
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        options: Any = {"process_group": group, "find_unused_parameters": True}
        wrapped: Any = model if compiled else DistributedDataParallel(model, **options)

        def step(x: Tensor, head: int) -> Tensor:
            optimizer.zero_grad()
            loss = wrapped(x, head).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()  # type: ignore[no-any-return]

        kind = graphopt.DataParallel(group=group)
        call: Any = graphopt.compile(step, parallel=kind) if compiled else step
        heads = [0, 1, 0, 2, 1] if rank else [0, 0, 1, 1, 0]
        losses = [call(x, head) for x, head in zip(batches(rank), heads, strict=False)]
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    return all(map(torch.equal, run(False), run(True)))


def test_unused_parameters_in_a_group_of_some_ranks(three_ranks: Pool) -> None:
    assert all(three_ranks.run(in_a_part))
