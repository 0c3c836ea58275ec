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
import graphopt
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
from sketch import skip_without_sends_to_itself

SINGLE = {"gpipe": torch_pipelining.ScheduleGPipe, "1f1b": torch_pipelining.Schedule1F1B}
MULTI = {
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "looped": torch_pipelining.ScheduleLoopedBFS,
    "zero bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero bubble V": torch_pipelining.ScheduleZBVZeroBubble,
}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    skip_without_sends_to_itself()
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


def check(found: dict[str, Tensor], expected: dict[str, Tensor], exact: bool) -> None:
    assert set(found) == set(expected)
    for name, value in found.items():
        if exact:
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(
    two_ranks: gloo.Pool, name: str, schedule: str, compiled: bool
) -> None:
    results = two_ranks.run(train_rank, name, schedule, compiled)
    stages = 2 if schedule in SINGLE else 4
    expected = reference(name, stages, backwards=schedule == "looped")
    # What is sent is contiguous; of "several" the module gives something transposed.
    check({**results[0], **results[1]}, expected, exact=name != "several")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("one_rank")
def test_all_stages_on_one_rank(name: str, compiled: bool) -> None:
    built = build(name, 3, [0, 1, 2], compiled)
    train(built, "interleaved")
    found = state({stage.stage_index: stage.submod for stage in built})
    check(found, reference(name, 3), exact=name != "several")


class Logging(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        graphopt.callback(print, x)
        return super().forward(x)


@pytest.mark.usefixtures("one_rank")
def test_a_callback_in_a_compiled_stage_is_refused() -> None:
    stage = Stage.from_module(Logging(4, 4), 0, 1, "cpu", input_args=(torch.randn(2, 4),))
    with pytest.raises(StageCompileError, match=r"graphopt\.callback"):
        stage.compile()


@pytest.mark.usefixtures("one_rank")
def test_the_last_stage_returns_what_its_module_returns() -> None:
    merged = train(build("several", 2, [0, 1], False), "interleaved")
    assert merged["out"].shape == (ROWS * MICROBATCHES, WIDTH)
    assert merged["rest"][0].dtype == torch.int64


@pytest.mark.usefixtures("one_rank")
def test_a_module_that_cannot_be_captured_runs_as_it_is() -> None:
    stage = Stage.from_module(
        Branches(0, True),
        0,
        1,
        "cpu",
        input_args=torch.randn(ROWS, WIDTH),
        output_args=torch.randn(ROWS, WIDTH),
    )
    twin = Branches(0, True)
    twin.load_state_dict(stage.submod.state_dict())
    train([stage], "gpipe")
    x, target = batch()
    for rows, wanted in zip(x.split(ROWS), target.split(ROWS), strict=True):
        loss(twin(rows), wanted).backward()
    check(state({0: stage.submod}), state({0: twin}, MICROBATCHES), exact=True)
    with pytest.raises(StageCompileError):
        Stage.from_module(
            Branches(0, True),
            0,
            1,
            "cpu",
            input_args=torch.randn(ROWS, WIDTH),
            output_args=torch.randn(ROWS, WIDTH),
        ).compile()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(WIDTH), nn.Dropout(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.norm(x))


@pytest.mark.usefixtures("one_rank")
def test_making_a_stage_does_not_run_its_module() -> None:
    module, x = Counting(), torch.randn(ROWS, WIDTH)
    buffers = [buffer.clone() for buffer in module.buffers()]
    before = torch.get_rng_state()
    Stage.from_module(module, 0, 1, "cpu", input_args=(x,))
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, module.buffers(), buffers))


X = torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("module", "index", "inputs", "outputs", "message"),
    [
        (3, 0, X, None, "made of an nn.Module, not of 3"),
        (Plain(0, True), 2, X, None, "no stage 2 of 2"),
        (Plain(0, True), 0, (X, 3), None, "input_args of stage 0: a int"),
        (Plain(0, True), 0, torch.randn(ROWS, 5), None, "does not run on fake tensors"),
        (Plain(0, True), 0, X, torch.randn(2, 2), "the stage was made for torch.float32 of shape"),
        (CASES["several"](0, True), 0, (X, X, X), None, "stages pass a tensor or a tuple"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_what_is_refused(module: Any, index: int, inputs: Any, outputs: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Stage.from_module(module, index, 2, "cpu", input_args=inputs, output_args=outputs)


@pytest.mark.usefixtures("one_rank")
def test_arguments_of_other_shapes_and_keywords_of_compiled_stages_are_refused() -> None:
    stage = build("plain", 1, [0], True)[0]
    schedule = torch_pipelining.ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss)
    x, target = batch()
    with pytest.raises(PartitionError, match="what stage 0 is called with"):
        schedule.step(x[:8], target=target[:8])
    with pytest.raises(StageCompileError, match="it is called with scale"):
        schedule.step(x, scale=x, target=target)


def disagree(rank: int) -> str:
    module = nn.Linear(WIDTH, WIDTH)
    example = X.double() if rank else X
    stage = Stage.from_module(module.to(example.dtype), rank, 2, "cpu", input_args=(example,))
    with pytest.raises(PartitionError) as caught:
        train([stage], "gpipe")
    return str(caught.value)


def test_neighbours_that_disagree_both_say_so(two_ranks: gloo.Pool) -> None:
    messages = two_ranks.run(disagree)
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "stage 0 sends torch.float32 of shape (3, 8); stage 1 was made for torch.float64"
    )
