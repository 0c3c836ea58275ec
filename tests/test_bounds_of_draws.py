"""Draws of torch's within bounds that a step reads from tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

DRAWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "uniform": lambda x, bound: torch.zeros_like(x).uniform_(-bound.item(), bound.item()),
    "of a part": lambda x, bound: torch.zeros_like(x)[:, 0].uniform_(
        -bound[0].item(), bound.item()
    ),
    "normal": lambda x, bound: torch.empty_like(x).normal_(0, std=bound.item() / 2),
    "exponential": lambda x, bound: torch.empty_like(x).exponential_(bound.item()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_it_is_as_in_eager_code(draw: Callable[[Tensor, Tensor], Any]) -> None:
    """As fast adversarial training begins. A graph holds for the bounds that it met."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        bounds = [torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([2.0])]

        def step(x: Tensor, bound: Tensor, model: nn.Module = model) -> Tensor:
            noise = draw(x, bound)
            loss = model(x + (noise if noise.ndim == 2 else noise[:, None])).square().sum()
            loss.backward()
            return loss

        used: Any = graphopt.compile(step) if compiled else step
        losses = [used(torch.randn(3, 4), bound).item() for bound in (*bounds, *bounds)]
        gradients = [p.grad for p in model.parameters()]
        found.append([losses, [g.tolist() for g in gradients if g is not None], torch.rand(1)])
    assert found[0] == found[1]
    assert len(used.captures) <= 4
