"""Models that FSDP shards: refused with what to do instead, and run as they are where that is asked
for."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphopt
from gloo import Pool


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def losses(rank: int, how: str | None) -> list[float] | str:
    """Of three steps on a sharded model; what an error says, where there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step: Any = train_step
    if how is not None:
        if how == "off":
            os.environ["GRAPHOPT_OFF"] = "1"
        try:
            step = graphopt.compile(train_step, fallback="eager" if how == "eager" else None)
        finally:
            os.environ.pop("GRAPHOPT_OFF", None)
    torch.manual_seed(rank)
    try:
        return [step(model, optimizer, torch.randn(3, 4)).item() for _ in range(3)]
    except graphopt.GraphOptError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["off", "eager"])
def test_runs_as_it_is_where_that_is_asked_for(two_ranks: Pool, how: str) -> None:
    assert two_ranks.run(losses, how) == two_ranks.run(losses, None)


@pytest.mark.filterwarnings("ignore")
def test_is_refused_with_the_cure(two_ranks: Pool) -> None:
    for said in two_ranks.run(losses, "captured"):
        assert "sharded by FSDP, which is not supported" in said
        assert "call the undecorated step" in said
