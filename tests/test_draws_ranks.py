"""Random numbers of Python and numpy in a step of two ranks, each of which draws for itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool


def begun(rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    random.seed(rank)
    numpy.random.seed(rank)
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def draws(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    lam = numpy.random.beta(0.4, 0.4)
    noise = torch.FloatTensor(numpy.random.normal(0, 1, (4, 3)))
    loss: Tensor = (model(lam * x + random.uniform(0.1, 1) * noise)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def decides(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return draws(model, optimizer, x * 2 if random.random() < 0.5 else x)


def trained(rank: int, captured: bool) -> list[Any]:
    model, optimizer = begun(rank)
    run: Callable[..., Any] = graphopt.compile(draws) if captured else draws
    given = model if captured else DistributedDataParallel(model)
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for _ in range(5)]
    losses = [run(given, optimizer, x).detach().clone() for x in batches]
    state = numpy.random.get_state()
    left = [state[1].tolist(), state[2:], random.getstate()]
    return [*losses, *(p.detach().clone() for p in model.parameters()), *left]


def both(rank: int) -> bool:
    pairs = zip(trained(rank, True), trained(rank, False), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def refused(rank: int) -> tuple[str, bool]:
    model, optimizer = begun(rank)
    before = random.getstate()
    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(decides)(model, optimizer, torch.ones(4, 3))
    return str(caught.value), random.getstate() == before


def test_each_rank_draws_for_itself(two_ranks: Pool) -> None:
    assert two_ranks.run(both) == [True, True]


def test_a_decision_by_a_draw_is_refused_when_it_is_captured(two_ranks: Pool) -> None:
    """Ranks that draw differently would run other graphs, maybe with other collectives."""
    for message, unchanged in two_ranks.run(refused):
        assert "which may be another one on each rank" in message
        assert "test_draws_ranks.py" in message
        assert unchanged
