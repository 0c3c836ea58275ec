"""Gradients in bfloat16: what is sent, what is left alone, and how far a training is off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from gloo import Pool
from graphopt.comm import get_all_comm_blocks
from graphopt.passes import compress_gradients
from graphopt.stages.pipelines import default_pipeline
from sketch import gradients, one_rank


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def captured(dtype: torch.dtype = torch.float32) -> graphopt.IterGraphModule:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(4, 8, dtype=dtype)
    found = graphopt.capture(step, model, optimizer, x, parallel=graphopt.DataParallel())
    return graphopt.IterGraphModule(found.graph_module)


def test_half_the_bytes() -> None:
    with one_rank():
        gm = captured()
        whole = [block.nbytes for block in get_all_comm_blocks(gm, "all_reduce")]
        buffers = [block.nbytes for block in get_all_comm_blocks(gm, "broadcast")]
        record = compress_gradients(gm)
        assert record.changes == len(whole) and record.changes_numerics
        assert [2 * b.nbytes for b in get_all_comm_blocks(gm, "all_reduce")] == whole
        assert [b.nbytes for b in get_all_comm_blocks(gm, "broadcast")] == buffers
        assert all(b.dtype is torch.bfloat16 for b in get_all_comm_blocks(gm, "all_reduce"))
        assert graphopt.comm.parameters_of(gm, get_all_comm_blocks(gm, "all_reduce")[0])
        with pytest.raises(graphopt.PassOrderError):
            compress_gradients(gm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_float32(dtype: torch.dtype) -> None:
    with one_rank():
        assert compress_gradients(captured(dtype)).changes == 0


def test_what_the_step_sends_itself_stays() -> None:
    with one_rank():
        assert compress_gradients(gradients((4,), (8,))).changes == 0


def with_compression() -> list[object]:
    pipeline = list(default_pipeline())
    pipeline.insert(2, compress_gradients)
    return pipeline


def train(rank: int, compressed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = with_compression() if compressed else "default"
    train_step = graphopt.compile(step, pipeline=pipeline)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        train_step(model, optimizer, torch.randn(32, 16, generator=generator))
    train_step.flush()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_error_of_a_training(two_ranks: Pool) -> None:
    """Ranks stay equal, and parameters are off by a small part of what they have moved."""
    exact = two_ranks.run(train, False)[0]
    one, other = two_ranks.run(train, True)
    assert all(map(torch.equal, one, other))
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).parameters()
    moved = torch.cat([(a - b.detach()).flatten() for a, b in zip(exact, start, strict=True)])
    off = torch.cat([(a - b).flatten() for a, b in zip(exact, one, strict=True)])
    assert 0 < off.norm() < 2**-7 * moved.norm()
