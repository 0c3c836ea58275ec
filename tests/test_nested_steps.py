"""A step that calls one that is compiled itself: it is part of the outer one's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool


def losses_of(rank: int, inner_compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def inner(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    called: Any = graphopt.compile(inner) if inner_compiled else inner

    def outer(x: Tensor) -> Tensor:
        first: Tensor = called(x)
        return first + called(2 * x)

    step = graphopt.compile(outer)
    losses = [step(torch.full((3, 4), 1.0 + number + rank)) for number in range(4)]
    step.flush()
    assert called is inner or not called.captures
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def alike(rank: int) -> bool:
    return all(map(torch.equal, losses_of(rank, False), losses_of(rank, True)))


def test_in_one_process() -> None:
    assert alike(0)


def test_on_two_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(alike) == [True, True]
