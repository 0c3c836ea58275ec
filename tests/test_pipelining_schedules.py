"""Stages trained by the schedules of torch.distributed.pipelining on real gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import pipelining as torch_pipelining

import gloo
from graphopt.pipelining import Pipe, pipeline, reduce_replicated_gradients
from pipeline_cases import CASES, MICROBATCHES, Case, reference_gradients

SINGLE = {"gpipe": torch_pipelining.ScheduleGPipe, "1f1b": torch_pipelining.Schedule1F1B}
MULTI = {
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero bubble V": torch_pipelining.ScheduleZBVZeroBubble,
}


def make_pipe(case: Case, stages: int) -> Pipe:
    torch.manual_seed(0)
    model = case.model(stages)
    args, kwargs = case.microbatch(0)
    return pipeline(model, args, kwargs, multi_use_param_spec=case.sharing)


def stages_of(rank: int, schedule_name: str, world: int) -> list[int]:
    if schedule_name in SINGLE:
        return [rank]
    return [rank, 2 * world - 1 - rank if schedule_name.endswith("V") else rank + world]


def train_rank(rank: int, case_name: str, schedule_name: str, world: int) -> dict[str, Tensor]:
    """One step of this rank's stages; the gradients by name of the model's parameters."""
    case = CASES[case_name]
    per_rank = 2 if schedule_name in MULTI else 1
    pipe = make_pipe(case, world * per_rank)
    built = [pipe.build_stage(index, "cpu") for index in stages_of(rank, schedule_name, world)]
    last = any(stage.is_last for stage in built)
    loss_fn = pipe.loss_fn if pipe.has_loss_and_backward else case.loss
    schedule: Any
    if schedule_name in MULTI:
        schedule = MULTI[schedule_name](built, MICROBATCHES, loss_fn=loss_fn)
    else:
        schedule = SINGLE[schedule_name](built[0], MICROBATCHES, loss_fn=loss_fn)
    del pipe
    args, kwargs, target = case.batch(MICROBATCHES)
    given = (args, kwargs) if rank == 0 else ((), {})
    losses: list[Tensor] = []
    wanted = {"target": target, "losses": losses} if last else {}
    schedule.step(*given[0], **given[1], **wanted)
    reduce_replicated_gradients(*built)
    return {
        name: parameter.grad
        for stage in built
        for name, parameter in stage.submod.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def check(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert {name for result in results for name in result} == set(expected)
    for result in results:
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
def test_two_ranks_have_the_gradients_of_one_process(
    two_ranks: gloo.Pool, case: str, schedule: str
) -> None:
    stages = 4 if schedule in MULTI else 2
    expected = reference_gradients(CASES[case], stages, MICROBATCHES)
    check(two_ranks.run(train_rank, case, schedule, 2), expected)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        ("tied replicated", "1f1b"),
        ("skips", "gpipe"),
        ("buffers", "interleaved"),
        ("shared later, transmitted", "zero bubble"),
    ],
)
def test_four_ranks_have_the_gradients_of_one_process(
    four_ranks: gloo.Pool, case: str, schedule: str
) -> None:
    expected = reference_gradients(CASES[case], 8 if schedule in MULTI else 4, MICROBATCHES)
    check(four_ranks.run(train_rank, case, schedule, 4), expected)
