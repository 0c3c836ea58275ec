"""Stages measured alone: every kind of pipe, and nothing of the caller's is changed."""

from __future__ import annotations

import copy

import pytest
import torch

from graphopt.pipelining import Pipe, pipeline
from graphopt.pipelining.timeline import ScheduleError, measure_durations
from graphopt.pipelining.timeline.slots import Action
from pipeline_cases import CASES, Case, Normed


def make_pipe(case: Case, stages: int) -> Pipe:
    args, kwargs = case.microbatch(0)
    return pipeline(case.model(stages), args, kwargs, multi_use_param_spec=case.sharing)


@pytest.mark.parametrize("name", CASES)
def test_every_stage_has_durations(name: str) -> None:
    durations = measure_durations(make_pipe(CASES[name], 4), repeats=1)
    assert durations.num_stages == 4
    assert all(seconds > 0 for seconds in durations.forward)
    # The first stage of "views" has no parameter that is trained.
    trained = range(name == "views", 4)
    assert all(durations.backward[stage] > 0 for stage in trained)
    assert all(
        durations.backward_input[stage] + durations.backward_weight[stage] > 0 for stage in trained
    )


def test_the_first_stage_does_its_whole_backward_in_w() -> None:
    durations = measure_durations(make_pipe(CASES["mlp"], 3), repeats=1)
    assert durations.backward_input[0] == 0
    assert durations.backward_weight[0] == durations.backward[0] == durations.of(Action(0, "B", 5))
    assert min(durations.backward_input[1:] + durations.backward_weight[1:]) > 0


def test_an_undivided_stage_does_its_whole_backward_in_i() -> None:
    """A stage that sends a parameter which has met nothing received."""
    durations = measure_durations(make_pipe(CASES["shared later, transmitted"], 4), repeats=1)
    assert durations.backward_weight[1] == 0
    assert durations.backward_input[1] == durations.backward[1] > 0


def test_the_pipe_and_the_random_numbers_are_as_before() -> None:
    model = Normed(3)
    args, kwargs = CASES["buffers"].microbatch(0)
    pipe = pipeline(model, args, kwargs)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_durations(pipe, repeats=1)
    assert torch.equal(torch.rand(3), expected)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_pipe_that_is_frozen() -> None:
    case = CASES["mlp"]
    model = case.model(2).requires_grad_(False)
    with pytest.raises(ScheduleError, match="nothing that the pipe returns needs a gradient"):
        measure_durations(pipeline(model, *case.microbatch(0)))


def test_under_no_grad() -> None:
    with torch.no_grad():
        assert min(measure_durations(make_pipe(CASES["mlp"], 2), repeats=1).backward) > 0
