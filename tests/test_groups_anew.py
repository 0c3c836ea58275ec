"""Process groups that are destroyed and made anew by the same processes: steps go on, and nothing
that the group before has left in the store counts.

Torch itself finds ranks by what is in the store, so each group has a prefix of its own there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphopt
from gloo import COLLECTIVE_TIMEOUT, Pool, pool


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[:depth]:
            x = torch.tanh(block(x))
        return x


def made_step() -> tuple[Any, nn.Module]:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, depth: int, asks: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, depth).square().sum()
        if asks:
            max([loss.detach()], key=float)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return graphopt.compile(step), model


def begin(rank: int, store: dist.Store, name: str) -> None:
    dist.destroy_process_group()
    store = dist.PrefixStore(name, store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE_TIMEOUT
    )


def train(rank: int, step: Any, depths: list[list[int]]) -> None:
    for number, depth in enumerate(depths[rank]):
        step(torch.full((2, 4), 1.0 + rank + number), depth)
    step.flush()


BEFORE = [[3, 2, 2, 2], [3, 2, 2, 2]]
AFTER = [[3, 2, 3, 3], [3, 2, 2, 3]]
"""One rank uses parameters that none has used in the same call of the group before."""


def goes_on(rank: int, path: str) -> bool:
    """Whether a step trains in two groups as in one."""
    store = dist.FileStore(f"{path}/store", 2)
    trained = []
    for groups in (1, 2):
        begin(rank, store, f"first of {groups}")
        step, model = made_step()
        train(rank, step, BEFORE)
        if groups == 2:
            begin(rank, store, "second of 2")
        train(rank, step, AFTER)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(map(torch.equal, *trained))


def after_a_refusal(rank: int, path: str) -> bool:
    """Meetings that have failed are no meetings of the next group."""
    store = dist.FileStore(f"{path}/store", 2)
    begin(rank, store, "before")
    step, _ = made_step()
    for _ in range(2):
        with pytest.raises((graphopt.CaptureError, graphopt.SpmdMismatchError)):
            step(torch.ones(2, 4), 3, bool(rank))
    begin(rank, store, "after")
    return bool(torch.isfinite(step(torch.ones(2, 4), 3)))


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    with pool(2) as ranks:
        yield ranks


def test_a_group_is_made_anew(fresh: Pool, tmp_path: Path) -> None:
    assert fresh.run(goes_on, str(tmp_path)) == [True, True]


def test_a_group_is_made_anew_after_refused_captures(fresh: Pool, tmp_path: Path) -> None:
    assert fresh.run(after_a_refusal, str(tmp_path)) == [True, True]
