"""DataParallel where ranks disagree, fail, or are more than two."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from gloo import Pool, RankError, pool
from graphopt.verify import check_spmd
from twins import SEED, Twins, World, assert_same, world
from zoo import MLP, MODELS, train_step

STEPS = 5


def batch(rank: int, i: int, model: str = "mlp") -> tuple[Tensor, Tensor]:
    return MODELS[model].batch(1000 * rank + i)


def optimizer_of(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# Ranks that are about to run different communication


def another_model() -> nn.Module:
    return MLP(layers=3)


def another_width() -> nn.Module:
    return MLP(width=24)


def another_dtype() -> nn.Module:
    return MLP().double()


def another_frozen_layer() -> nn.Module:
    model = MLP()
    model.head.requires_grad_(False)
    return model


def another_buffer() -> nn.Module:
    model = MLP()
    model.register_buffer("extra", torch.zeros(3))
    return model


def run_mismatch(rank: int, odd: Callable[[], nn.Module]) -> dict[str, Any]:
    torch.manual_seed(SEED + rank)
    model = odd() if rank == 1 else MLP()
    optimizer = optimizer_of(model)
    before = World(train_step, [model], [optimizer]).state()
    x, y = batch(rank, 0)
    step = graphopt.compile(train_step, pipeline="none")
    with pytest.raises(graphopt.GraphOptError) as caught:
        step(model, optimizer, x.to(model.head.weight.dtype), y)
    assert_same(World(train_step, [model], [optimizer]).state(), before, "state")
    return {"type": type(caught.value).__name__, "message": str(caught.value)}


@pytest.mark.parametrize(
    "odd",
    [another_model, another_width, another_dtype, another_frozen_layer, another_buffer],
    ids=lambda odd: odd.__name__,
)
def test_rank_with_another_graph(two_ranks: Pool, odd: Callable[[], nn.Module]) -> None:
    """An error on every rank, within its time-out, that names a rank: never a hang."""
    for outcome in two_ranks.run(run_mismatch, odd, timeout=60):
        assert outcome["type"] == "SpmdMismatchError"
        assert "rank" in outcome["message"]


def run_check_spmd(rank: int, layers: int) -> str:
    model = MLP(layers=layers if rank == 1 else 2)
    captured = graphopt.capture(train_step, model, optimizer_of(model), *batch(rank, 0))
    try:
        check_spmd(captured.graph_module, timeout=20.0)
    except graphopt.SpmdMismatchError as error:
        return str(error)
    return ""


def test_check_spmd(two_ranks: Pool) -> None:
    assert two_ranks.run(run_check_spmd, 2) == ["", ""]
    for said in two_ranks.run(run_check_spmd, 3):
        assert "rank 1 has other collectives than rank 0" in said
        assert "all_reduce" in said


def test_the_group_still_works_after_a_mismatch(two_ranks: Pool) -> None:
    two_ranks.run(run_against_ddp, "mlp", {}, True)


def branching(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    if dist.get_rank() == 1 and loss > 0:
        return loss
    loss.backward()
    optimizer.step()
    return loss


def raising(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise LookupError("no such example")
    return train_step(model, optimizer, x, y)


def run_failing_rank(rank: int, step: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(SEED + rank)
    model = MLP()
    optimizer = optimizer_of(model)
    with pytest.raises(graphopt.GraphOptError) as caught:
        graphopt.compile(step, pipeline="none")(model, optimizer, *batch(rank, 0))
    return {"type": type(caught.value).__name__, "message": str(caught.value)}


def test_rank_that_averages_nothing(two_ranks: Pool) -> None:
    for found in two_ranks.run(run_failing_rank, branching, timeout=60):
        assert found["type"] == "SpmdMismatchError"
        assert "rank 1 has other collectives" in found["message"]


def extra_before(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        dist.all_reduce(x)  # EXTRA
    return train_step(model, optimizer, x, y)


def extra_between(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if dist.get_rank() == 0:
        dist.broadcast(loss.detach(), 0)  # EXTRA
    optimizer.step()
    return loss


def extra_at_the_end(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, y)
    total = loss.detach().clone()
    if dist.get_rank() == 1:
        dist.all_reduce(total)  # EXTRA
    return total


@pytest.mark.parametrize("step", [extra_before, extra_between, extra_at_the_end])
def test_a_collective_of_one_rank_alone_is_named_with_its_line(
    two_ranks: Pool, step: Callable[..., Any]
) -> None:
    for found in two_ranks.run(run_failing_rank, step, timeout=60):
        assert found["type"] == "SpmdMismatchError"
        assert "# EXTRA" in found["message"], found["message"]


def run_extra_of_check_spmd(rank: int) -> str:
    model = MLP()
    args = model, optimizer_of(model), *batch(rank, 0)
    captured = graphopt.capture(extra_before, *args, parallel=graphopt.Manual())
    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        check_spmd(captured.graph_module, timeout=20.0)
    return str(caught.value)


def test_check_spmd_names_the_line_of_a_collective_of_one_rank_alone(two_ranks: Pool) -> None:
    for said in two_ranks.run(run_extra_of_check_spmd):
        assert "# EXTRA" in said


def test_rank_whose_capture_fails(two_ranks: Pool) -> None:
    """The rank has its own error; the others learn which rank failed instead of waiting for it."""
    healthy, failed = two_ranks.run(run_failing_rank, raising, timeout=60)
    assert failed["type"] == "CaptureError"
    assert healthy["type"] == "SpmdMismatchError"
    assert "rank 1" in healthy["message"]


def run_alone(rank: int) -> str:
    if rank == 1:
        return ""
    model = MLP()
    step = graphopt.compile(
        train_step, pipeline="none", parallel=graphopt.DataParallel(timeout=2.0)
    )
    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        step(model, optimizer_of(model), *batch(rank, 0))
    return str(caught.value)


def test_rank_that_never_comes(two_ranks: Pool) -> None:
    message, _ = two_ranks.run(run_alone, timeout=60)
    assert "[1]" in message
    two_ranks.close()  # the ranks have not called the step equally often


def run_changed_size(rank: int) -> None:
    """From two ranks to each rank alone: captured anew, without communication."""
    torch.manual_seed(SEED)
    model = MLP()
    optimizer = optimizer_of(model)
    step = graphopt.compile(train_step, pipeline="none")
    for i in range(2):
        step(model, optimizer, *batch(rank, i))
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        twin, other = copy.deepcopy((model, optimizer))
        for i in range(2, STEPS):
            expected = train_step(twin, other, *batch(rank, i))
            assert_same(step(model, optimizer, *batch(rank, i)), expected, "loss")
        states = [
            World(train_step, [m], [o]).state() for m, o in ((model, optimizer), (twin, other))
        ]
        assert_same(states[0], states[1], "state")
        dist.destroy_process_group()


def test_changed_world_size() -> None:
    with pool(2) as ranks:
        ranks.run(run_changed_size)


# Buffers that come from rank 0 before each forward


def two_forwards(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """What the first has saved of batch norm's statistics is used behind the second."""
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(-1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def run_two_forwards(rank: int) -> None:
    twins = Twins(lambda: world(two_forwards, "convnet"), ddp=True, seed=SEED + rank)
    for i in range(STEPS):
        twins.step(*batch(rank, i, "convnet"))
    twins.finish(captures=1)


def test_buffers_received_between_two_forwards(two_ranks: Pool) -> None:
    two_ranks.run(run_two_forwards)


# Three ranks


def run_against_ddp(rank: int, model: str, ddp_options: dict[str, Any], exact: bool) -> float:
    twins = Twins(
        lambda: world(model=model, optimizer="sgd-momentum-foreach"),
        ddp=True,
        ddp_options=ddp_options,
        seed=SEED + rank,
        exact=exact,
    )
    for i in range(STEPS):
        twins.step(*batch(rank, i, model))
    twins.finish()
    return twins.largest_gap


def test_three_ranks(three_ranks: Pool) -> None:
    """A ring of three sums each element in an order that depends on where its bucket places it.

    One all-reduce for each gradient places elements otherwise than DDP's buckets do, so the bits
    may differ; `pytest -rP` shows by how much.
    """
    gap = max(three_ranks.run(run_against_ddp, "gpt", {}, False))
    print(f"GPT on 3 ranks: largest difference to DDP's default buckets {gap:.2g}")
    assert gap < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt", "convnet"])
def test_three_ranks_with_one_bucket_for_each_parameter(three_ranks: Pool, model: str) -> None:
    """With the same layout as ours, DDP's sums have the same bits as ours."""
    three_ranks.run(run_against_ddp, model, {"bucket_cap_mb": 1e-6}, True)


def run_subgroup(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    twins = Twins(
        world,
        ddp=True,
        ddp_options={"process_group": group},
        seed=SEED + rank,
        parallel=graphopt.DataParallel(group=group),
    )
    for i in range(STEPS):
        twins.step(*batch(rank, i))
    twins.finish(captures=1)


def test_group_of_some_ranks(three_ranks: Pool) -> None:
    three_ranks.run(run_subgroup)


def test_a_hung_rank_is_reported() -> None:
    """The pool itself: a rank that waits for ever fails its test with a traceback."""
    with pool(2) as ranks:
        assert ranks.run(number_of) == [0, 1]  # they are there, and have imported this module
        with pytest.raises(RankError, match="wait_for_ever"):
            ranks.run(wait_for_ever, timeout=2)


def number_of(rank: int) -> int:
    return rank


def wait_for_ever(rank: int) -> None:
    if rank == 0:
        dist.barrier()
