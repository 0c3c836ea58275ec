"""Stages of models that were divided by hand, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining

import gloo
from graphopt.errors import PartitionError
from graphopt.pipelining import Stage, StageCompileError
from hand_cut_cases import (
    CASES,
    MICROBATCHES,
    ROWS,
    WIDTH,
    Branches,
    Plain,
    batch,
    examples,
    loss,
    modules,
    reference,
    state,
)

SINGLE = {"gpipe": torch_pipelining.ScheduleGPipe, "1f1b": torch_pipelining.Schedule1F1B}
MULTI = {
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "looped": torch_pipelining.ScheduleLoopedBFS,
    "zero bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero bubble V": torch_pipelining.ScheduleZBVZeroBubble,
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[gloo.Pool]:
    with gloo.pool(2) as pool:
        yield pool


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(name: str, stages: int, own: list[int], compiled: bool) -> list[Stage]:
    chain, received = modules(name, stages), examples(name, stages)
    built = [
        Stage.from_module(chain[index], index, stages, "cpu", input_args=received[index])
        for index in own
    ]
    return [stage.compile() for stage in built] if compiled else built


def train(built: list[Stage], schedule_name: str, steps: int = 1) -> Any:
    kind: Any = {**SINGLE, **MULTI}[schedule_name]
    given: Any = built[0] if schedule_name in SINGLE else built
    schedule = kind(given, MICROBATCHES, loss_fn=loss)
    x, target = batch()
    first, last = any(s.is_first for s in built), any(s.is_last for s in built)
    return schedule.step(*([x] if first else []), **({"target": target} if last else {}))


def train_rank(rank: int, name: str, schedule: str, compiled: bool) -> dict[str, Tensor]:
    if schedule in SINGLE:
        stages, own = 2, [rank]
    else:
        stages, own = 4, [rank, 3 - rank if schedule.endswith("V") else rank + 2]
    built = build(name, stages, own, compiled)
    train(built, schedule)
    return state({stage.stage_index: stage.submod for stage in built})


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(
    two_ranks: gloo.Pool, name: str, schedule: str, compiled: bool
) -> None:
    results = two_ranks.run(train_rank, name, schedule, compiled)
    check({**results[0], **results[1]}, reference(name, 2 if schedule in SINGLE else 4))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("one_rank")
def test_all_stages_on_one_rank(name: str, compiled: bool) -> None:
    built = build(name, 3, [0, 1, 2], compiled)
    train(built, "interleaved")
    check(state({stage.stage_index: stage.submod for stage in built}), reference(name, 3))


@pytest.mark.usefixtures("one_rank")
def test_the_last_stage_returns_what_its_module_returns() -> None:
    merged = train(build("several", 2, [0, 1], False), "interleaved")
    assert merged["out"].shape == (ROWS * MICROBATCHES, WIDTH)
    assert merged["rest"][0].dtype == torch.int64
