"""`torch.nn.DataParallel` with no device to scatter to: a module that calls another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from test_decisions import assert_alike, left_by

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it scatters to these devices")


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


@pytest.mark.parametrize("closed_over", [False, True])
def test_it_is_the_module_within(closed_over: bool) -> None:
    assert_alike(trained(True, closed_over), trained(False, closed_over))


def test_one_that_scatters_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(4, 3))
    model.device_ids = [0]
    with pytest.raises(CaptureError, match=r"is wrapped in DataParallel[^?]*model\.module"):
        graphopt.capture(lambda net, x: net(x).sum().backward(), model, torch.randn(2, 4))
