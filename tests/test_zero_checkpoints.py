"""Checkpoints of sharded trainings: written on two ranks, read on other numbers, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import graphopt
from gloo import Pool
from zero_cases import Beside, Language, batches, same, sharded, train_step, whole

Wanted = dict[str, torch.Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def mixed() -> torch.nn.Module:
    return Language(layers=0, width=264)


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), found, strict=True))


def wholes(state: Any) -> Wanted:
    """All tensors of nested state, whole, by their places; collective."""
    found: Wanted = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(entry, f"{place}.{key}")
        elif isinstance(value, torch.Tensor):
            found[place] = whole(value.detach()).clone()

    walk(state, "")
    return found


def run_writing(rank: int, folder: str, stage: int) -> Wanted:
    pair = Beside(mixed, adamw, stage=stage)
    pair.run(rank, 2)
    state = states(pair.model, pair.optimizer)
    dcp.save(state, checkpoint_id=folder)
    return wholes(state)


def loaded(model: Any, optimizer: Any, folder: str) -> Wanted:
    """What a training has after it has read a checkpoint."""
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return wholes(states(model, optimizer))


def run_reading(rank: int, folder: str, stage: int) -> Wanted:
    """Into a training that has shards; stage 0: into a plain one."""
    torch.manual_seed(1)
    model = mixed()
    optimizer = adamw(model.parameters())
    kind = graphopt.ZeRO(stage=stage) if stage else None
    step: Any = (
        graphopt.compile(train_step, parallel=kind, pipeline="none") if stage else train_step
    )
    given = next(batches(rank, 1))
    step(model, optimizer, *given)
    if stage:
        assert sharded(optimizer.state[model.tokens.weight]["exp_avg"])
    found = loaded(model, optimizer, folder)
    step(model, optimizer, *given)  # goes on
    return found


def run_fsdp(rank: int, folder: str, write: str) -> Wanted:
    """Into FSDP2, which writes what it has then."""
    torch.manual_seed(2)
    model = fully_shard(mixed())
    optimizer = adamw(model.parameters())
    train_step(model, optimizer, *next(batches(rank, 1)))
    found = loaded(model, optimizer, folder)
    dcp.save(states(model, optimizer), checkpoint_id=write)
    return found


def agree(found: Wanted, wanted: Wanted) -> None:
    assert found.keys() == wanted.keys()
    for place, value in wanted.items():
        same(found[place], value, place)


@pytest.mark.parametrize("reading", [0, 1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_read_on_three_ranks(
    two_ranks: Pool, three_ranks: Pool, tmp_path: Path, stage: int, reading: int
) -> None:
    wanted, _ = two_ranks.run(run_writing, str(tmp_path), stage)
    for found in three_ranks.run(run_reading, str(tmp_path), reading):
        agree(found, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_read_on_four_ranks(two_ranks: Pool, four_ranks: Pool, tmp_path: Path, stage: int) -> None:
    wanted, _ = two_ranks.run(run_writing, str(tmp_path), stage)
    for found in four_ranks.run(run_reading, str(tmp_path), stage):
        agree(found, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_read_on_one_rank(two_ranks: Pool, one_rank: None, tmp_path: Path, stage: int) -> None:
    wanted, _ = two_ranks.run(run_writing, str(tmp_path), stage)
    agree(run_reading(0, str(tmp_path), 0), wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_into_fsdp_and_back(two_ranks: Pool, tmp_path: Path, stage: int) -> None:
    one, other = str(tmp_path / "ours"), str(tmp_path / "theirs")
    wanted, _ = two_ranks.run(run_writing, one, stage)
    for found in two_ranks.run(run_fsdp, one, other):
        agree(found, wanted)
    for found in two_ranks.run(run_reading, other, stage):
        agree(found, wanted)
