"""A large gradient is sent in two parts, one of which is held back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool
from graphopt.comm import get_all_comm_blocks
from graphopt.iter_graph import IterGraphModule
from graphopt.stages.pipelines import pipeline_with
from graphopt.testing import fake_ranks

WHOLE, PARTS = pipeline_with(8, 0.4), pipeline_with(8, 0.4, True)
LARGE = 512 * 330
"""Elements of the gradient that is most of all; not a multiple of what parts are aligned to."""


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Linear(24, 512), nn.GELU(), nn.Linear(512, 330), nn.GELU(), nn.Linear(330, 3)
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured() -> IterGraphModule:
    args = (*made(), torch.ones(8, 24))
    train_step(*args)  # makes the state of the optimizer
    parallel = graphopt.DataParallel()
    return IterGraphModule(graphopt.capture(train_step, *args, parallel=parallel).graph_module)


def sizes(module: IterGraphModule) -> list[int]:
    """Elements of what is sent, in order."""
    shapes = (block.shape for block in get_all_comm_blocks(module, "all_reduce"))
    return [shape.numel() for shape in shapes if shape is not None]


def test_a_share_of_it_is_held_back() -> None:
    with fake_ranks(2):
        whole, parts = captured(), captured()
        graphopt.PassManager(WHOLE, verify="equivalence").run(whole)
        graphopt.PassManager(PARTS, verify="equivalence").run(parts)
    assert LARGE in sizes(whole), sizes(whole)
    assert len(sizes(parts)) == len(sizes(whole)) + 1
    assert sizes(parts)[-1] == pytest.approx(0.4 * LARGE, abs=16)  # behind what is made last
    first = LARGE - sizes(parts)[-1]
    assert first in sizes(parts)[:-1]
    assert sum(sizes(parts)) == sum(sizes(whole))


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_no_part_is_empty(share: float) -> None:
    with fake_ranks(2):
        module = captured()
        graphopt.PassManager(pipeline_with(8, share, True), verify="equivalence").run(module)
    assert sorted(sizes(module))[0] == 16 and sum(sizes(module)[:1] + sizes(module)[-1:]) == LARGE


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_small_ones_and_the_last_one_are_sent_whole(share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 330), nn.Linear(330, 3))  # the large one is made last
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fake_ranks(2):
        parallel = graphopt.DataParallel()
        args = (model, optimizer, torch.ones(8, 512))
        train_step(*args)
        gm = graphopt.capture(train_step, *args, parallel=parallel).graph_module
        whole, parts = IterGraphModule(copy.deepcopy(gm)), IterGraphModule(gm)
        graphopt.PassManager(pipeline_with(8, share)).run(whole)
        graphopt.PassManager(pipeline_with(8, share, True)).run(parts)
    assert sizes(parts) == sizes(whole)


def trained(rank: int, exactly: bool) -> list[torch.Tensor]:
    model, optimizer = made()
    eager, eager_optimizer = made()
    step = graphopt.compile(train_step, pipeline=PARTS)
    ddp = DistributedDataParallel(eager)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(8, 24, generator=generator)
        step(model, optimizer, x)
        train_step(ddp, eager_optimizer, x)
    assert len(sizes(step.graph_module)) == 3, sizes(step.graph_module)
    step.flush()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b) if exactly else torch.allclose(a, b, atol=1e-4)
    return [p.detach() for p in model.parameters()]


def test_bitwise_as_data_parallel(two_ranks: Pool) -> None:
    one, other = two_ranks.run(trained, True)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_three_ranks_have_the_same(three_ranks: Pool) -> None:
    first, *others = three_ranks.run(trained, False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
