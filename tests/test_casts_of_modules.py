"""`module.to(…)` in a forward: nothing where everything is there already, and else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from twins import Twins, World


class Routed(nn.Module):
    """Casts its router in every forward, which changes nothing but in the first one of a model of
    half precision."""

    def __init__(self, cast: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.router, self.norm, self.cast = nn.Linear(4, 3), nn.BatchNorm1d(4), cast

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.cast(self.router)
        self.norm = self.cast(self.norm)
        routed: Tensor = self.router(self.norm(x.float()))
        return routed


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "dtype": lambda module: module.to(torch.float32),
    "device": lambda module: module.to("cpu"),
    "like": lambda module: module.to(torch.zeros(1)),
    "float": lambda module: module.float(),
    "cpu": lambda module: module.cpu(),
}


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("cast", CASTS)
def test_casts_that_change_nothing(cast: str) -> None:
    def build() -> World:
        model = Routed(CASTS[cast])
        return World(step, [model], [torch.optim.Adam(model.parameters())])

    twins = Twins(build)
    for _ in range(3):
        twins.step(torch.randn(5, 4))
    twins.finish(captures=1)


@pytest.mark.parametrize("before", [torch.bfloat16, torch.float64])
def test_a_cast_is_refused(before: torch.dtype) -> None:
    model = Routed(CASTS["float"]).to(before)
    with pytest.raises(graphopt.CaptureError, match="casts or moves parameters") as refusal:
        graphopt.capture(step, model, torch.optim.SGD(model.parameters()), torch.randn(5, 4))
    assert "self.router = self.cast(self.router)" in str(refusal.value) or "module.float()" in str(
        refusal.value
    )
    assert {p.dtype for p in model.parameters()} == {before}
