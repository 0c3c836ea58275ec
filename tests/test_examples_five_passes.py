"""Five further passes as users write them: each does what it promises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.comm import late_nodes
from graphopt.graph_utils import find_nodes, is_wait
from graphopt.testing import check_pass, fake_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import five_further_passes as five


@pytest.fixture(autouse=True)
def _ranks(without_settings: None) -> Iterator[None]:
    with fake_ranks(2):
        yield


@pytest.mark.parametrize(
    ("pass_", "step", "options"), five.PASSES, ids=[entry[0].name for entry in five.PASSES]
)
def test_pass(pass_: Any, step: Any, options: dict[str, Any]) -> None:
    assert check_pass(step, five.arguments(), pass_, **options).changed


def test_what_is_computed_again_need_not_be_kept() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = model, optimizer, torch.randn(1024, 32)
    gm = graphopt.capture(five.train_step, *args).graph_module
    record = five.recompute_gelu(gm)
    assert record.peak_bytes_after < 0.8 * record.peak_bytes_before


def test_the_wait_for_the_embedding_is_late() -> None:
    gm = graphopt.IterGraphModule(graphopt.capture(five.train_step, *five.arguments()).graph_module)
    five.late_embedding(gm)
    (wait,) = (node for node in find_nodes(gm.graph, is_wait) if node in late_nodes(gm))
    assert wait.meta["val"].shape == (64, 16)
