"""Python numbers that a step keeps outside its arguments, on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool


class Agent:
    """In every second call the loss has another term, and a second optimizer steps."""

    def __init__(self, wrapped: bool) -> None:
        torch.manual_seed(0)
        self.nets: Any = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        if wrapped:
            self.nets = [DistributedDataParallel(net) for net in self.nets]
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizers = [torch.optim.Adam(parameters), torch.optim.SGD(parameters, lr=0.1)]
        self.calls, self.sum = 0, 0.0

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        loss = sum(F.cross_entropy(net(x), y) for net in self.nets) / self.calls
        if self.calls % 2 == 0:
            loss = loss + self.nets[0](x).square().mean()
        optimizer = self.optimizers[self.calls % 2]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.sum += loss.item()
        return loss

    def left(self) -> Any:
        state = [list(net.parameters()) for net in self.nets]
        return copy.deepcopy((state, self.calls, self.sum))


def trained(rank: int, start: int, compiled: bool) -> tuple[list[Any], int]:
    agent = Agent(wrapped=not compiled)
    agent.calls = start
    step = graphopt.compile(agent.step) if compiled else agent.step
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(6):
        x = torch.randn(5, 4, generator=generator)
        step(x, torch.randint(0, 3, (5,), generator=generator))
        found.append(agent.left())
    return found, len(step.captures) if isinstance(step, graphopt.TrainStep) else 0


def compared(rank: int, apart: bool) -> tuple[bool, int, Any]:
    start = rank if apart else 0
    (expected, _), (found, captures) = trained(rank, start, False), trained(rank, start, True)
    parameters = [[p for net in each[0] for p in net] for each in expected]
    ours = [[p for net in each[0] for p in net] for each in found]
    equal = all(
        torch.equal(a, b)
        for x, y in zip(parameters, ours, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    return equal and [e[1:] for e in expected] == [f[1:] for f in found], captures, found[-1][1:]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_count_for_themselves(two_ranks: Pool, apart: bool) -> None:
    """Also where one has counted further, and takes the other branch."""
    results = two_ranks.run(compared, apart)
    assert [equal for equal, *_ in results] == [True, True]
    assert [captures for _, captures, _ in results] == [2, 2]
    (calls, total), (others, other_total) = (left for *_, left in results)
    assert (calls, others) == (6, 6 + apart) and total != other_total
