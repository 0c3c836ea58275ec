"""What a step reads from outside its arguments, on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import graphopt
from gloo import Pool


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y) * factor["beta"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


factor = {"beta": 0.5}


def autocast_region_around_updates(rank: int) -> tuple[str, int, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(train)
    batch = torch.randn(3, 4) + rank, torch.tensor([0, 1, 0])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(graphopt.CaptureError) as caught:
        compiled(model, optimizer, *batch)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            compiled(model, optimizer, *batch)
    return str(caught.value), len(compiled.captures), model.weight.detach().clone()


def test_autocast_region_around_updates_is_refused_on_all_ranks(two_ranks: Pool) -> None:
    results = two_ranks.run(autocast_region_around_updates)
    for message, captures, weight in results:
        assert "autocast" in message and "test_outside_ranks.py" in message
        assert captures == 1
        assert torch.equal(weight, results[0][2])


def change_on_both_ranks(rank: int) -> tuple[int, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(train)
    batch = torch.randn(3, 4) + rank, torch.tensor([0, 1, 0])
    for beta in (0.5, 0.5, 0.75, 0.75):
        factor["beta"] = beta
        compiled(model, optimizer, *batch)
    compiled.flush()
    return len(compiled.captures), model.weight.detach().clone()


def test_change_is_followed_on_all_ranks(two_ranks: Pool) -> None:
    results = two_ranks.run(change_on_both_ranks)
    assert [captures for captures, _ in results] == [2, 2]
    assert torch.equal(results[0][1], results[1][1])
