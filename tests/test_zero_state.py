"""State of a sharded step as others see it: whole parameters, errors in time, and checkpoints that
are written on two ranks and read on other numbers."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import graphopt
from gloo import Pool
from zero_cases import Beside, Language, batches, same, sharded, train_step, whole


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run_whole_parameters(rank: int) -> None:
    pair = Beside(lambda: Language(layers=1, width=256), adamw, stage=3)
    pair.run(rank)
    inside = next(batches(rank, 1))[0]
    with pair.step.full_parameters():
        same(pair.model(inside).detach(), pair.reference(inside).detach(), "output")
        with torch.no_grad():
            for model in (pair.model, pair.reference):
                model.head.weight.mul_(0.5)
        with pytest.raises(graphopt.GraphOptError, match="full_parameters"):
            pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)))
    pair.compare()
    state = pair.step.full_state_dict()
    assert state.keys() == pair.reference.state_dict().keys()
    for name, value in pair.reference.state_dict().items():
        same(state[name], value, name)
    copied = copy.deepcopy(pair.model)
    assert sharded(copied.head.weight)
    before = {name: value.clone() for name, value in pair.reference.state_dict().items()}
    pair.run(rank, 1)
    pair.model.load_state_dict(before)
    pair.reference.load_state_dict(before)
    pair.compare()
    pair.run(rank, 1)
    pair.compare()


def test_whole_parameters_and_state(two_ranks: Pool) -> None:
    two_ranks.run(run_whole_parameters)


def saved(value: Any) -> Any:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "deepcopy of state": (copy.deepcopy, lambda model, optimizer: model.state_dict()),
    "deepcopy of both states": (
        copy.deepcopy,
        lambda model, optimizer: [model.state_dict(), optimizer.state_dict()],
    ),
    "deepcopy of what is checkpointed": (
        copy.deepcopy,
        lambda model, optimizer: list(get_state_dict(model, optimizer)),
    ),
    "deepcopy of parameters": (
        copy.deepcopy,
        lambda model, optimizer: dict(model.named_parameters()),
    ),
    "deepcopy of objects": (
        lambda pair: [each.state_dict() for each in copy.deepcopy(pair)],
        lambda model, optimizer: (model, optimizer),
    ),
    "averaged model": (
        lambda model: AveragedModel(model).module.state_dict(),
        lambda model, optimizer: model,
    ),
    "saved": (saved, lambda model, optimizer: [model.state_dict(), optimizer.state_dict()]),
}


def run_copies(rank: int, stage: int) -> dict[str, str]:
    """Copies have the values, and keep them in later steps. An error of one rank alone is told to
    the other before they speak of values."""
    pair = Beside(mixed, adamw, stage=stage, pipeline="default")
    pair.run(rank, 1)
    failed: dict[str, str] = {}
    for name, (copied, of) in COPIES.items():
        found, said, everyone = None, "", [""] * 2
        try:
            found = copied(of(pair.model, pair.optimizer))
        except RuntimeError as error:
            said = str(error)
        dist.all_gather_object(everyone, said)
        if any(everyone):
            failed[name] = said
            continue
        expected = wholes(copied(of(pair.reference, pair.reference_optimizer)))
        agree(wholes(found), expected)
        pair.run(rank, 1)
        agree(wholes(found), expected)
    pair.compare()
    return failed


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_state(two_ranks: Pool, stage: int) -> None:
    """Rows of `mixed` begin at no multiple of 64 elements on rank 1."""
    assert two_ranks.run(run_copies, stage) == [{}, {}]


def run_alone(rank: int) -> tuple[str, float]:
    pair = Beside(lambda: Language(layers=0, width=256), adamw, stage=3)
    pair.run(rank, 1)
    start = time.monotonic()
    said = ""
    if rank == 0:
        try:
            with pair.step.full_parameters():
                raise AssertionError("whole on one rank")
        except graphopt.SpmdMismatchError as error:
            said = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    pair.run(rank, 1)
    pair.compare()
    return said, seconds


def test_whole_parameters_on_one_rank(two_ranks: Pool) -> None:
    (said, seconds), _ = two_ranks.run(run_alone)
    assert "full_parameters()" in said and "rank(s) [1]" in said
    assert seconds < 20


def run_loaded_state(rank: int) -> None:
    """Whole tensors in `load_state_dict` of the optimizer are cut in the next call."""
    pair = Beside(lambda: Language(layers=0, width=256), adamw, stage=1)
    pair.run(rank, 2)
    pair.optimizer.load_state_dict(copy.deepcopy(pair.reference_optimizer.state_dict()))
    assert not sharded(pair.optimizer.state[pair.model.head.weight]["exp_avg"])
    pair.run(rank, 2)
    assert sharded(pair.optimizer.state[pair.model.head.weight]["exp_avg"])
    pair.compare()


def test_loading_a_whole_state(two_ranks: Pool) -> None:
    two_ranks.run(run_loaded_state)


def run_saving(rank: int, folder: str, stage: int) -> dict[str, torch.Tensor]:
    pair = Beside(lambda: Language(layers=0, width=256), adamw, stage=stage)
    pair.run(rank, 2)
    model, optimizer = get_state_dict(pair.model, pair.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    pair.run(rank, 1)
    return pair.reference.state_dict()


def run_resuming(rank: int, folder: str, stage: int) -> dict[str, Any]:
    """Go on from a checkpoint with one more step."""
    torch.manual_seed(1)
    model = Language(layers=0, width=256)
    optimizer = adamw(model.parameters())
    kind = graphopt.ZeRO(stage=stage) if dist.get_world_size() > 1 else None
    step = graphopt.compile(train_step, parallel=kind, pipeline="none")
    given = list(batches(rank, 1))
    step(model, optimizer, *given[0])  # makes state, and cuts it
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step(model, optimizer, *given[0])
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_goes_on(two_ranks: Pool, tmp_path: Path, stage: int) -> None:
    wanted, _ = two_ranks.run(run_saving, str(tmp_path), stage)
    found, _ = two_ranks.run(run_resuming, str(tmp_path), stage)
    for name, value in wanted.items():
        same(found[name], value, name)


Wanted = dict[str, torch.Tensor]


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
        elif isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                walk(entry, f"{place}.{index}")
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
