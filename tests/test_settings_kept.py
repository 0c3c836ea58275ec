"""Settings of an optimizer that are no numbers, which a step sets to what they are anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import CaptureError


def _trained(compiled: bool, kept: Any, later: Any, key: str = "max_norm_ratio") -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters()), "max_norm": 1.0, key: kept}], lr=0.1
    )

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            group["max_norm"] = 0.5
            group[key] = group[key]
            if group[key] is not None:
                nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
        optimizer.step()
        return loss.item()

    run = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for index in range(5):
        if index == 3:
            optimizer.param_groups[0][key] = later
        loss = run(torch.randn(3, 4))
        found += [loss, model.weight.tolist(), *map(str, optimizer.param_groups[0].values())][:-1]
    return found


@pytest.mark.parametrize(("kept", "later"), [(None, None), (None, "yes"), ("yes", None)])
def test_it_stays_what_it_is(kept: Any, later: Any) -> None:
    assert _trained(True, kept, later) == _trained(False, kept, later)


def test_another_value_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.param_groups[0]["note"] = "other"
        model(x).sum().backward()
        optimizer.step()

    optimizer.param_groups[0]["note"] = "one"
    with pytest.raises(CaptureError, match="changes 'note' of an optimizer's parameter group"):
        graphopt.compile(step)(torch.randn(3, 4))
