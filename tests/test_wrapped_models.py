"""Models that FSDP shards, and `torch.nn.DataParallel` with no device to scatter to."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphopt
from gloo import Pool
from graphopt.errors import CaptureError
from test_decisions import assert_alike, left_by


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
def test_a_sharded_model_runs_as_it_is_where_that_is_asked_for(two_ranks: Pool, how: str) -> None:
    assert two_ranks.run(losses, how) == two_ranks.run(losses, None)


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_is_refused_with_the_cure(two_ranks: Pool) -> None:
    for said in two_ranks.run(losses, "captured"):
        assert "sharded by FSDP, which is not supported" in said
        assert "call the undecorated step" in said


no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="it scatters to these devices")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.DataParallel(nn.Linear(4, 6))
        self.last = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.last(self.features(x).relu()) * scale


def trained(compiled: bool, closed_over: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.DataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    averages = {key: value.clone() for key, value in model.state_dict().items()}

    def body(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        net.train()
        loss = F.cross_entropy(net(x, scale=2.0), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for key, value in net.state_dict().items():
            averages[key].copy_(0.9 * averages[key] + 0.1 * value)
        bare = net.module if hasattr(net, "module") else net
        return loss.item(), bare.last[2].weight.detach().norm()

    def step(x: Tensor, y: Tensor) -> Any:
        return body(model, x, y)

    function: Any = step if closed_over else body
    run = graphopt.compile(function) if compiled else function
    given = () if closed_over else (model,)
    found: list[Any] = []
    for _ in range(4):
        result = run(*given, torch.randn(5, 4), torch.randint(0, 3, (5,)))
        found += [
            result,
            *left_by(model, optimizer),
            *[value.clone() for value in averages.values()],
        ]
    return [*found, len(run.captures) if compiled else 1]


@no_device
@pytest.mark.parametrize("closed_over", [False, True])
def test_a_data_parallel_model_is_the_module_within(closed_over: bool) -> None:
    assert_alike(trained(True, closed_over), trained(False, closed_over))


@no_device
def test_one_that_scatters_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(4, 3))
    model.device_ids = [0]
    with pytest.raises(CaptureError, match=r"is wrapped in DataParallel[^?]*model\.module"):
        graphopt.capture(lambda net, x: net(x).sum().backward(), model, torch.randn(2, 4))
