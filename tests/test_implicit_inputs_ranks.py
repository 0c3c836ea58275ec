"""What a step closes over, on two ranks: averaged and begun alike, as what it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool


class Whole(nn.Module):
    """The model and what belongs to none, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.net, self.scale, x)


def loss_of(net: nn.Module, scale: Tensor, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) * scale.exp()).pow(2).mean()
    return loss


def trained(rank: int, closed: bool) -> list[Tensor]:
    torch.manual_seed(rank)  # the ranks do not begin alike by themselves
    whole = Whole()
    net, scale = whole.net, whole.scale
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, scale, x)
        loss.backward()
        optimizer.step()
        return loss

    def given(whole: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = whole(x)  # its buffers are sent from rank 0, as those of `net`
        loss.backward()
        optimizer.step()
        return loss

    closing, passing = graphopt.compile(step), graphopt.compile(given)
    losses = []
    for i in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + i))
        losses.append(closing(x) if closed else passing(whole, optimizer, x))
    return [each.detach().clone() for each in (*losses, *whole.state_dict().values())]


def both(rank: int) -> tuple[bool, list[float]]:
    closed, given = trained(rank, True), trained(rank, False)
    return all(map(torch.equal, closed, given)), closed[4].tolist()


def accumulated(rank: int) -> tuple[list[Tensor], list[float]]:
    """The first call averages nothing, and begins with rank 0's values all the same."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(x: Tensor, update: bool) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    losses = []
    for i in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
        if i % 2:
            losses.append(step(x, True))
        else:
            with step.no_sync():
                losses.append(step(x, False))
    return [each.detach() for each in losses], model.weight.flatten().tolist()


def test_all_begin_alike_where_the_first_call_averages_nothing(two_ranks: Pool) -> None:
    (losses, mine), (others, theirs) = two_ranks.run(accumulated)
    assert all(map(torch.equal, losses, others))  # of equal data
    assert mine == theirs


def in_backward(rank: int) -> str:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(x: Tensor) -> None:
        handle = model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        model(x).sum().backward()
        handle.remove()

    try:
        step(torch.ones(5, 4) + rank)
    except graphopt.GraphOptError as error:
        return str(error)
    return ""


def test_an_optimizer_within_the_backward_is_refused(two_ranks: Pool) -> None:
    assert all("within the backward" in said for said in two_ranks.run(in_backward))


def test_closed_over_is_as_given(two_ranks: Pool) -> None:
    (same, mine), (other, theirs) = two_ranks.run(both)
    assert same
    assert other
    assert mine == theirs


def points(rank: int, averaged: bool) -> list[Tensor]:
    """Points of each rank's own are given to each call, and keep their gradients; marks and
    dictionaries by parameter besides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    wrapped: nn.Module = model if averaged else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = {p: 0.5 + n for n, p in enumerate(model.parameters())}

    def step(model: Any, optimizer: Any, x: Tensor, x_of_scales: list[Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        for p in x_of_scales:
            p.grad.data = p.grad.data * scales[p]  # type: ignore[union-attr]
            p.last = p.detach() * 1.0  # type: ignore[attr-defined]
        optimizer.step()
        return loss.detach()

    x = torch.rand(6, 2, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    run: Any = graphopt.compile(step) if averaged else step
    losses = [run(wrapped, optimizer, x, list(model.parameters())).clone() for _ in range(4)]
    assert x.grad is not None
    marks = [p.last for p in model.parameters()]  # type: ignore[attr-defined]
    return [*losses, x.grad, *(p.detach() for p in model.parameters()), *marks]


def as_with_ddp(rank: int) -> list[bool]:
    return [*map(torch.equal, points(rank, True), points(rank, False))]


def test_gradients_of_arguments_are_a_ranks_own(two_ranks: Pool) -> None:
    assert all(map(all, two_ranks.run(as_with_ddp)))


def reached_apart(rank: int, compiled: bool) -> list[Tensor]:
    """Some calls get to one layer of the closure, others to both."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Linear(6, 3)]
    first, second = layers if compiled else map(DistributedDataParallel, layers)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)

    def step(number: int, x: Tensor) -> Tensor:
        hidden = first(x)
        loss = second(hidden).square().mean() if number > 1 else hidden.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    called: Any = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    found = [called(i, torch.randn(5, 4, generator=generator)).detach() for i in range(5)]
    return [*found, *(p.detach() for layer in layers for p in layer.parameters())]


def reached_as_with_ddp(rank: int) -> list[bool]:
    return list(map(torch.equal, reached_apart(rank, True), reached_apart(rank, False)))


def test_layers_reached_by_paths_of_their_own(two_ranks: Pool) -> None:
    assert all(map(all, two_ranks.run(reached_as_with_ddp)))


def differentiated_first(rank: int, compiled: bool) -> tuple[list[Tensor], int]:
    """Gradients of the batch come before `zero_grad`."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 3)
    whole = model if compiled else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), [x])
        loss = whole(x.detach() + 0.1 * slope.sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    called: Any = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    found = [called(torch.randn(5, 4, generator=generator)).detach() for _ in range(4)]
    made = called._calls.captured if compiled else 1
    return [*found, *(p.detach() for p in model.parameters())], made


def differentiated_as_with_ddp(rank: int) -> tuple[bool, int]:
    (found, made), (expected, _) = (
        differentiated_first(rank, True),
        differentiated_first(rank, False),
    )
    return all(map(torch.equal, found, expected)), made


def test_gradients_of_a_batch_before_zero_grad_need_one_capture(two_ranks: Pool) -> None:
    assert two_ranks.run(differentiated_as_with_ddp) == [(True, 1), (True, 1)]
