"""Process groups of buffers, and groups that are destroyed and made anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphopt
from gloo import COLLECTIVE_TIMEOUT, Pool, pool
from graphopt.graph_utils import find_nodes, is_collective
from twins import SEED, Twins, World, world
from zoo import MODELS

STEPS = 4


@contextmanager
def ranks_of_this_machine(said: int | None) -> Iterator[None]:
    """As a launcher says it."""
    before = os.environ.pop("LOCAL_WORLD_SIZE", None)
    if said is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(said)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def groups_of(twins: Twins) -> dict[str, set[str]]:
    """By operator, in which groups the last graph calls it."""
    found: dict[str, set[str]] = {}
    for node in find_nodes(twins.compiled.graph_module.graph, is_collective):
        name = "broadcast" if "broadcast" in str(node.target) else "all_reduce"
        found.setdefault(name, set()).add(str(node.args[-1]))
    return found


def trained(rank: int, model: str, captures: int = 1, **options: Any) -> Twins:
    """A training beside DDP's, whose program changes buffers and reads them on rank 0 alone."""

    def disturb(w: World) -> None:
        for buffer in w.model.buffers():
            buffer.add_(rank)

    fresh = graphopt.DataParallel(group=dist.new_group())
    options = {"ddp": True, "parallel": fresh, "pipeline": "default", **options}
    twins = Twins(lambda: world(model=model), seed=SEED + rank, **options)
    for i in range(STEPS):
        twins.step(*MODELS[model].batch(1000 * rank + i, 4))
        if i % 2:
            twins.both(disturb)
        if rank == 0:
            twins.both(lambda w: w.model.state_dict())
    twins.finish(captures=captures)
    return twins


def run_between_machines(rank: int, model: str) -> dict[str, set[str]]:
    with ranks_of_this_machine(1):
        return groups_of(trained(rank, model))


def test_buffers_have_a_group_of_their_own(two_ranks: Pool) -> None:
    for groups in two_ranks.run(run_between_machines, "convnet"):
        (averaging,) = groups["all_reduce"]
        assert groups["broadcast"] == {f"{averaging} buffers"}


def test_none_is_made_for_a_model_without_buffers(two_ranks: Pool) -> None:
    for groups in two_ranks.run(run_between_machines, "mlp"):
        assert set(groups) == {"all_reduce"}
        assert len(groups["all_reduce"]) == 1


def run_said(rank: int, said: tuple[int | None, int | None]) -> dict[str, set[str]]:
    with ranks_of_this_machine(said[rank]):
        return groups_of(trained(rank, "convnet"))


@pytest.mark.parametrize("said", [(2, 2), (None, None), (1, 2), (2, 1)])
def test_one_group_where_a_rank_says_that_all_share_a_machine(
    two_ranks: Pool, said: tuple[int | None, int | None]
) -> None:
    for groups in two_ranks.run(run_said, said):
        assert groups["broadcast"] == groups["all_reduce"]


def run_eagerly_beside_a_graph(rank: int) -> None:
    with ranks_of_this_machine(1):
        parallel = graphopt.DataParallel(group=dist.new_group())
        trained(rank, "convnet", parallel=parallel)
        os.environ["GRAPHOPT_OFF"] = "1"
        try:
            trained(rank, "convnet", parallel=parallel, captures=0)
        finally:
            del os.environ["GRAPHOPT_OFF"]


def test_a_step_without_graph_receives_buffers_as_well(two_ranks: Pool) -> None:
    two_ranks.run(run_eagerly_beside_a_graph)


def run_again(rank: int, folder: str, number: int) -> dict[str, set[str]]:
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with ranks_of_this_machine(1):
        twins = Twins(lambda: world(model="convnet"), ddp=True, seed=SEED + rank)
        for i in range(STEPS):
            twins.step(*MODELS["convnet"].batch(1000 * rank + i, 4))
        twins.finish(captures=1)
        return groups_of(twins)


def test_groups_that_are_destroyed_and_made_again(tmp_path: Any) -> None:
    with pool(2) as ranks:
        for number in range(3):
            for groups in ranks.run(run_again, str(tmp_path), number):
                assert groups == {"all_reduce": {"0"}, "broadcast": {"0 buffers"}}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        for block in self.blocks[:depth]:
            x = torch.tanh(block(x))
        return x


def made_step() -> tuple[Any, nn.Module]:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, depth: int, asks: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, depth).square().sum()
        if asks:
            max([loss.detach()], key=float)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return graphopt.compile(step), model


def begin(rank: int, store: dist.Store, name: str) -> None:
    dist.destroy_process_group()
    store = dist.PrefixStore(name, store)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE_TIMEOUT
    )


def train(rank: int, step: Any, depths: list[list[int]]) -> None:
    for number, depth in enumerate(depths[rank]):
        step(torch.full((2, 4), 1.0 + rank + number), depth)
    step.flush()


BEFORE = [[3, 2, 2, 2], [3, 2, 2, 2]]


AFTER = [[3, 2, 3, 3], [3, 2, 2, 3]]
"""One rank uses parameters that none has used in the same call of the group before."""


def goes_on(rank: int, path: str) -> bool:
    """Whether a step trains in two groups as in one."""
    store = dist.FileStore(f"{path}/store", 2)
    trained = []
    for groups in (1, 2):
        begin(rank, store, f"first of {groups}")
        step, model = made_step()
        train(rank, step, BEFORE)
        if groups == 2:
            begin(rank, store, "second of 2")
        train(rank, step, AFTER)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(map(torch.equal, *trained))


def after_a_refusal(rank: int, path: str) -> bool:
    """Meetings that have failed are no meetings of the next group."""
    store = dist.FileStore(f"{path}/store", 2)
    begin(rank, store, "before")
    step, _ = made_step()
    for _ in range(2):
        with pytest.raises((graphopt.CaptureError, graphopt.SpmdMismatchError)):
            step(torch.ones(2, 4), 3, bool(rank))
    begin(rank, store, "after")
    return bool(torch.isfinite(step(torch.ones(2, 4), 3)))


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    with pool(2) as ranks:
        yield ranks


def test_a_group_is_made_anew(fresh: Pool, tmp_path: Path) -> None:
    assert fresh.run(goes_on, str(tmp_path)) == [True, True]


def test_a_group_is_made_anew_after_refused_captures(fresh: Pool, tmp_path: Path) -> None:
    assert fresh.run(after_a_refusal, str(tmp_path)) == [True, True]
