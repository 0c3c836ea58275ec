"""DataParallel on real gloo ranks against DistributedDataParallel, bit for bit on every rank.

Ranks start from different weights, draw different random numbers and see different batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import graphopt
from gloo import Pool
from steps import (
    GRADIENT_STEPS,
    accumulate,
    autocast_step,
    clip_norm,
    dictionary,
    step_keeping_gradients,
    zero_not_none,
)
from twins import SEED, Twins, World, assert_same, world
from zoo import MLP, MODELS, train_step

STEPS = 5


def twins_on(rank: int, build: Callable[[], World], **options: Any) -> Twins:
    return Twins(build, ddp=True, seed=SEED + rank, **options)


def batch(rank: int, i: int, model: str = "mlp", size: int = 4) -> tuple[Tensor, Tensor]:
    return MODELS[model].batch(1000 * rank + i, size)


def count(captured: Any, operator: str) -> int:
    """How often a captured graph calls a functional collective."""
    targets = [str(n.target) for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    return sum(target.startswith(f"_c10d_functional.{operator}") for target in targets)


# Models


def run_model(rank: int, model: str) -> dict[str, int]:
    options = {}
    if model == "checkpointed-reentrant":  # DDP takes these only in a graph declared static
        options = {"find_unused_parameters": False, "static_graph": True}
    twins = twins_on(rank, lambda: world(model=model), ddp_options=options)
    for i in range(STEPS):
        twins.step(*batch(rank, i, model))
    twins.finish(captures=1)
    graph = twins.compiled.captures[-1]
    module = twins.captured.model
    return {
        "broadcasts": count(graph, "broadcast"),
        "dtypes": len({b.dtype for b in module.buffers()}),
        "reductions": count(graph, "all_reduce"),
        "waits": count(graph, "wait_tensor"),
    }


# A GPT: test_pipelines_ranks.py.
@pytest.mark.parametrize(
    "model", ["partial", "reused", "convnet", "checkpointed", "shared-storage"]
)
def test_model(two_ranks: Pool, model: str) -> None:
    for counts in two_ranks.run(run_model, model):
        assert counts["broadcasts"] <= counts["dtypes"]
        # Two layers of "partial" get no gradient: one is unused and one is frozen.
        trained = len(list(MODELS[model].make().parameters())) - (4 if model == "partial" else 0)
        assert counts["reductions"] == trained
        assert counts["waits"] == counts["reductions"] + counts["broadcasts"]


# Optimizers

SEVERAL = ["adam-loop", "adamw-amsgrad-fused", "sgd-nesterov-foreach", "rmsprop-loop"]


def run_optimizer(rank: int, optimizer: str) -> None:
    twins = twins_on(rank, lambda: world(optimizer=optimizer))
    for i in range(STEPS):
        twins.step(*batch(rank, i))
    twins.finish()


@pytest.mark.parametrize("optimizer", SEVERAL)
def test_optimizer(two_ranks: Pool, optimizer: str) -> None:
    two_ranks.run(run_optimizer, optimizer)


def run_schedule(rank: int, optimizer: str) -> None:
    def build() -> World:
        built = world(optimizer=optimizer)
        built.extra["scheduler"] = OneCycleLR(built.optimizer, max_lr=0.05, total_steps=20)
        return built

    twins = twins_on(rank, build)
    for i in range(STEPS):
        twins.step(*batch(rank, i))
        twins.both(lambda w: w.extra["scheduler"].step())
    twins.finish(captures=1)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-momentum-foreach"])
def test_schedule(two_ranks: Pool, optimizer: str) -> None:
    two_ranks.run(run_schedule, optimizer)


# Steps

# DDP reduces in hooks of one backward per forward, so these two have no counterpart under it.
WITHOUT_COUNTERPART = ("two_losses", "autograd_grad")


def run_step(rank: int, step: Callable[..., Any], model: str) -> None:
    twins = twins_on(rank, lambda: world(step, model))
    for i in range(STEPS):
        twins.step(*batch(rank, i, model))
    twins.finish(captures=2 if step is zero_not_none else 1)


@pytest.mark.parametrize(
    "step",
    [s for s in GRADIENT_STEPS if s.__name__ not in WITHOUT_COUNTERPART] + [dictionary],
    ids=lambda step: step.__name__,
)
def test_step(two_ranks: Pool, step: Callable[..., Any]) -> None:
    two_ranks.run(run_step, step, "mlp")


@pytest.mark.parametrize("model", ["reused", "gpt", "convnet"])
def test_autocast(two_ranks: Pool, model: str) -> None:
    two_ranks.run(run_step, autocast_step, model)


def test_clipping_of_the_averaged_gradients(two_ranks: Pool) -> None:
    two_ranks.run(run_step, clip_norm, "convnet")


def run_accumulation(rank: int, model: str, broadcast_buffers: bool) -> None:
    twins = twins_on(
        rank,
        lambda: world(accumulate, model),
        parallel=graphopt.DataParallel(broadcast_buffers=broadcast_buffers),
        ddp_options={} if broadcast_buffers else {"broadcast_buffers": False},
    )
    for i in range(9):
        last = i % 3 == 2
        with nullcontext() if last else twins.no_sync():
            twins.step(*batch(rank, i, model), last)
        collectives = sum(count(twins.compiled, kind) for kind in ("all_reduce", "broadcast"))
        assert (collectives > 0) == last
    twins.finish()


@pytest.mark.parametrize(
    ("model", "broadcast_buffers"), [("mlp", True), ("partial", True), ("convnet", False)]
)
def test_accumulation_with_no_sync(two_ranks: Pool, model: str, broadcast_buffers: bool) -> None:
    """Nothing is communicated under no_sync; the last call averages what has accumulated."""
    two_ranks.run(run_accumulation, model, broadcast_buffers)


def run_accumulation_with_buffers(rank: int) -> None:
    twins = twins_on(rank, lambda: world(accumulate, "convnet"), ignore=("buffers",))
    for i in range(9):
        last = i % 3 == 2
        with nullcontext() if last else twins.no_sync():
            twins.step(*batch(rank, i, "convnet"), last)
    twins.finish()
    if rank == 0:
        buffers = [dict(w.model.named_buffers()) for w in (twins.captured, twins.eager)]
        assert_same(buffers[0], buffers[1], "buffers")


def test_accumulation_with_buffers(two_ranks: Pool) -> None:
    """All but the buffers of ranks other than 0, which DDP broadcasts at another call.

    DDP decides in a forward whether the *next* one broadcasts: the first call under no_sync does,
    and the synchronised call after it does not. Ours broadcasts in exactly the synchronised calls.
    """
    two_ranks.run(run_accumulation_with_buffers)


def run_gradients_across_calls(rank: int) -> None:
    """Without no_sync, gradients that already were averaged accumulate and are averaged again."""
    twins = twins_on(rank, lambda: world(accumulate))
    for i in range(6):
        twins.step(*batch(rank, i), i % 3 == 2)
    twins.finish()


def test_accumulation_without_no_sync(two_ranks: Pool) -> None:
    two_ranks.run(run_gradients_across_calls)


# Parameters that not every rank uses


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        return sum(
            (branch(hidden) for branch, taken in ((self.left, left), (self.right, right)) if taken),
            start=torch.zeros(4),
        )


def branch_step(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, left: bool, right: bool
) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, left, right), y)
    loss.backward()
    optimizer.step()
    return loss


def branches() -> World:
    model = Branches()
    return World(branch_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])


def run_branches(rank: int) -> None:
    twins = twins_on(rank, branches)
    for i in range(STEPS):
        twins.step(*batch(rank, i), True, rank == 0)
    twins.finish()
    model = twins.captured.model
    assert model.right.weight.grad is not None
    assert model.never.weight.grad is None
    assert not twins.captured.optimizer.state.get(model.never.weight)


def test_parameter_unused_on_one_rank(two_ranks: Pool) -> None:
    two_ranks.run(run_branches)


def run_alternating_branches(rank: int) -> None:
    twins = twins_on(rank, branches)
    twins.step(*batch(rank, 0), True, True)
    for i in range(1, 7):
        twins.step(*batch(rank, i), True, (i + rank) % 2 == 0)
    twins.finish()


def test_parameter_unused_on_alternating_ranks(two_ranks: Pool) -> None:
    two_ranks.run(run_alternating_branches)


def run_new_parameter(rank: int) -> None:
    twins = twins_on(rank, branches)
    for i in range(6):
        twins.step(*batch(rank, i), True, i >= 3)
    twins.finish()


def test_parameter_first_used_later(two_ranks: Pool) -> None:
    """A flag that changes on all ranks alike is agreed on anew."""
    two_ranks.run(run_new_parameter)


# Batches and state that differ between ranks and between steps


def run_uneven(rank: int, model: str) -> None:
    twins = twins_on(rank, lambda: world(model=model))
    for i in range(STEPS):
        short = i == STEPS - 1 and rank == 1
        twins.step(*batch(rank, i, model, size=3 if short else 4))
    twins.finish(captures=1 + rank)


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_uneven_last_batch_on_one_rank(two_ranks: Pool, model: str) -> None:
    two_ranks.run(run_uneven, model)


def run_different_sizes(rank: int) -> None:
    twins = twins_on(rank, lambda: world(model="gpt"))
    for i in range(STEPS):
        twins.step(*batch(rank, i, "gpt", size=2 + rank))
    twins.finish(captures=1)


def test_batch_sizes_that_always_differ(two_ranks: Pool) -> None:
    two_ranks.run(run_different_sizes)


def run_buffers(rank: int) -> None:
    def disturb(w: World) -> None:
        w.model.features[1].running_mean.add_(rank)

    twins = twins_on(rank, lambda: world(model="convnet"))
    for i in range(STEPS):
        twins.step(*batch(rank, i, "convnet"))
        twins.both(disturb)
    twins.finish(captures=1)


def test_buffers_follow_rank_zero(two_ranks: Pool) -> None:
    two_ranks.run(run_buffers)


def run_checkpoint_on_rank_zero(rank: int) -> None:
    twins = twins_on(rank, lambda: world(model="convnet"))
    for i in range(STEPS):
        twins.step(*batch(rank, i, "convnet"))
        if rank == 0:
            twins.both(lambda w: [w.model.state_dict(), w.optimizer.state_dict()])
    twins.finish(captures=1)


def test_state_dict_on_rank_zero_alone(two_ranks: Pool) -> None:
    two_ranks.run(run_checkpoint_on_rank_zero)


# Settings


def run_options(rank: int, ours: dict[str, bool], theirs: dict[str, bool]) -> int:
    parallel = graphopt.DataParallel(**ours)
    twins = twins_on(rank, lambda: world(model="convnet"), parallel=parallel, ddp_options=theirs)
    for i in range(STEPS):
        twins.step(*batch(rank, i, "convnet"))
    twins.finish(captures=1)
    return count(twins.compiled.captures[-1], "broadcast")


@pytest.mark.parametrize(
    ("ours", "theirs", "broadcasts"),
    [
        ({}, {}, True),
        ({"broadcast_buffers": False}, {"broadcast_buffers": False}, False),
        ({"broadcast": False}, {"init_sync": False}, True),
    ],
    ids=str,
)
def test_options(
    two_ranks: Pool, ours: dict[str, bool], theirs: dict[str, bool], broadcasts: bool
) -> None:
    for found in two_ranks.run(run_options, ours, theirs):
        assert bool(found) == broadcasts


def run_manual(rank: int) -> None:
    twins = Twins(world, seed=SEED + rank, parallel=graphopt.Manual())
    for i in range(STEPS):
        twins.step(*batch(rank, i))
    twins.finish(captures=1)
    assert count(twins.compiled.captures[-1], "") == 0


def test_manual_adds_no_communication(two_ranks: Pool) -> None:
    """Each rank trains alone, as its eager twin without DDP does."""
    two_ranks.run(run_manual)


def run_own_communication(rank: int) -> int:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= torch.distributed.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    twins = Twins(lambda: world(step), seed=SEED + rank, parallel=graphopt.Manual())
    for i in range(STEPS):
        twins.step(*batch(rank, i))
    twins.finish(captures=1)
    return count(twins.compiled.captures[-1], "all_reduce")


def test_manual_communication_of_the_step(two_ranks: Pool) -> None:
    expected = len(list(MLP().parameters()))
    assert two_ranks.run(run_own_communication) == [expected, expected]


def run_kept_gradients(rank: int) -> None:
    twins = twins_on(rank, lambda: world(step_keeping_gradients, "partial"))
    for i in range(STEPS):
        twins.step(*batch(rank, i, "partial"))
    twins.finish(captures=1)
    model = twins.captured.model
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.body.weight.grad is not None


def test_unused_everywhere_keeps_no_gradient(two_ranks: Pool) -> None:
    two_ranks.run(run_kept_gradients)


def run_weight_sync(rank: int) -> list[float]:
    """Start-up broadcast alone: after one step with lr 0, all ranks hold rank 0's weights."""
    torch.manual_seed(SEED + rank)
    model = MLP()
    step = graphopt.compile(train_step, pipeline="none")
    step(model, torch.optim.SGD(model.parameters(), lr=0.0), *batch(rank, 0))
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_start_up_broadcast(two_ranks: Pool) -> None:
    first, second = two_ranks.run(run_weight_sync)
    torch.manual_seed(SEED)
    assert first == second == [float(p.detach().double().sum()) for p in MLP().parameters()]
