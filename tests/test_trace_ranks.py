"""Steps recorded on real gloo ranks, and laid over the predicted ones."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gloo
import graphopt
from gloo import Pool
from graphopt.errors import FileError, MissingFileError
from graphopt.pipelining import Pipe, pipeline
from graphopt.pipelining.timeline import (
    SCHEDULES,
    ScheduleError,
    ScheduleOrder,
    ScheduleTimeline,
    record_schedule,
)
from graphopt.pipelining.timeline.clock import CudaMarks, clock_offsets
from graphopt.pipelining.timeline.trial import Trial
from graphopt.schedule import measured_step
from pipeline_cases import CASES, MICROBATCHES

METHODS = {"forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"}


def make_pipe(case_name: str, stages: int) -> Pipe:
    torch.manual_seed(0)
    case = CASES[case_name]
    return pipeline(case.model(stages), *case.microbatch(0), multi_use_param_spec=case.sharing)


def trial_of(name: str, case_name: str) -> Trial:
    kind = SCHEDULES[name]
    pipe = make_pipe(case_name, dist.get_world_size() * kind.usual_stages)
    return Trial(pipe, kind, MICROBATCHES)


def stages_of(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


def recorded(rank: int, name: str, case_name: str) -> tuple[ScheduleTimeline, bool]:
    """The timeline, and whether stages and loss function are as before."""
    trial = trial_of(name, case_name)
    loss_fn = trial.schedule._loss_fn
    trial.step()
    with record_schedule(trial.schedule) as recording:
        trial.step()
    restored = trial.schedule._loss_fn is loss_fn and not any(
        METHODS & set(vars(stage)) for stage in stages_of(trial.schedule)
    )
    return recording.timeline(), restored


@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, "mlp") for name in SCHEDULES), ("zero-bubble", "skips"), ("1f1b", "loss inside")],
)
def test_a_step_runs_the_actions_of_the_prediction(
    two_ranks: gloo.Pool, name: str, case: str
) -> None:
    (timeline, restored), (other, also_restored) = two_ranks.run(recorded, name, case)
    assert restored and also_restored
    assert timeline == other
    order = ScheduleOrder.named(name, 2, 2 * SCHEDULES[name].usual_stages, MICROBATCHES)
    assert tuple(tuple(s.action for s in row) for row in timeline.by_rank) == order.actions
    assert timeline.start == 0 < timeline.end and timeline.origin == "measured"
    # One clock: nothing starts before what it received was made.
    slots = {str(slot.action): slot for slot in timeline.slots}
    for stage in range(order.num_stages - 1):
        for microbatch in range(MICROBATCHES):
            made, received = slots[f"{stage}F{microbatch}"], slots[f"{stage + 1}F{microbatch}"]
            assert made.end <= received.start
    for row in timeline.by_rank:
        assert all(before.end <= after.start for before, after in pairwise(row))


def gradients(rank: int, record: bool) -> list[Tensor]:
    trial = trial_of("zbv", "skips")
    stages = stages_of(trial.schedule)
    found: list[Tensor] = []

    def keep(module: Any) -> None:
        found.extend(p.grad.clone() for p in module.parameters() if p.grad is not None)

    for stage in stages:
        stage.submod.zero_grad = lambda module=stage.submod: keep(module)
    if record:
        with record_schedule(trial.schedule):
            trial.step()
    else:
        trial.step()
    return found


def test_gradients_are_those_without_a_record(two_ranks: gloo.Pool) -> None:
    plain, watched = two_ranks.run(gradients, False), two_ranks.run(gradients, True)
    for left, right in zip(plain, watched, strict=True):
        assert left and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def counted(rank: int, steps: int) -> str:
    trial = trial_of("1f1b", "mlp")
    with record_schedule(trial.schedule) as recording:
        for _ in range(steps):
            trial.step()
    with pytest.raises(ScheduleError) as raised:
        recording.timeline()
    return str(raised.value)


@pytest.mark.parametrize(("steps", "message"), [(0, "no step"), (2, "more than one step")])
def test_not_one_step(two_ranks: gloo.Pool, steps: int, message: str) -> None:
    assert all(text.startswith(message) for text in two_ranks.run(counted, steps))


def interrupted(rank: int) -> bool:
    trial = trial_of("gpipe", "mlp")
    (stage,) = stages_of(trial.schedule)
    own = stage.forward_one_chunk

    def other(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    stage.forward_one_chunk = other
    with pytest.raises(KeyError), record_schedule(trial.schedule):
        raise KeyError
    return METHODS & set(vars(stage)) == {"forward_one_chunk"} and stage.forward_one_chunk is other


def test_after_an_error_everything_is_as_before(two_ranks: gloo.Pool) -> None:
    assert all(two_ranks.run(interrupted))


def offsets(rank: int, ahead: float, hosts: bool) -> list[float]:
    host = f"host {rank}" if hosts else None
    return clock_offsets(None, now=lambda: time.monotonic() + ahead * rank, host=host)


def test_clocks_of_one_host_are_one(two_ranks: gloo.Pool) -> None:
    assert two_ranks.run(offsets, 100.0, False) == [[0.0, 0.0]] * 2


def test_clocks_of_several_hosts_are_compared(two_ranks: gloo.Pool) -> None:
    first, second = two_ranks.run(offsets, 100.0, True)
    assert first == second
    # The bound is half of a round trip on this machine; a minute is none.
    assert first[0] == 0 and first[1] == pytest.approx(100, abs=60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_of_a_cuda_device() -> None:
    x = torch.ones(512, 512, device="cuda")
    marks = CudaMarks(x.device)
    before = time.monotonic()
    first = marks.mark()
    for _ in range(50):
        x = x @ x
    second = marks.mark()
    torch.cuda.synchronize()
    after = time.monotonic()
    seconds = [marks.seconds(first), marks.seconds(second)]
    # The device's clock and the host's are read one after the other: to a millisecond.
    assert before - 1e-3 < seconds[0] < seconds[1] < after + 1e-3


def misfit(rank: int) -> str:
    with pytest.raises(ScheduleError) as raised:
        Trial(make_pipe("mlp", 2), SCHEDULES["zbv"], MICROBATCHES)
    return str(raised.value)


def test_a_pipe_that_does_not_fit(two_ranks: gloo.Pool) -> None:
    assert all("2 ranks need 4 stages, not 2" in text for text in two_ranks.run(misfit))


def trained(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def profiled(rank: int, folder: str, calls: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    step = graphopt.compile(trained, pipeline="none")
    step(model, optimizer, torch.randn(8, 64))
    with torch.profiler.profile() as profile:
        for _ in range(calls):
            step(model, optimizer, torch.randn(8, 64))
        step.flush()
    path = Path(folder) / f"trace{rank}.json"
    profile.export_chrome_trace(str(path))
    timeline = graphopt.simulate(step.graph_module)
    if calls < 2:
        with pytest.raises(FileError, match="two calls"):
            measured_step(path)
        return {}
    measured = measured_step(path)
    page, trace = Path(folder) / f"page{rank}.html", Path(folder) / f"both{rank}.json"
    timeline.to_html(page, measured)
    timeline.save_chrome_trace(trace, measured)
    return {
        "predicted": [slot.message.launch.name for slot in timeline.collectives],
        "measured": [slot._asdict() for slot in measured.collectives],
        "compute": [slot._asdict() for slot in measured.compute],
        "seconds": measured.step_seconds,
        "page": page.read_text(),
        "events": json.loads(trace.read_text())["traceEvents"],
    }


def test_a_measured_step_beside_the_predicted_one(two_ranks: Pool, tmp_path: Path) -> None:
    for found in two_ranks.run(profiled, str(tmp_path), 5):
        assert len(found["measured"]) == len(found["predicted"]) > 1
        assert {slot["name"] for slot in found["measured"]} == {"gloo:all_reduce"}
        names = [slot["name"] for slot in found["compute"]]
        assert names.count("aten::mm") + names.count("aten::addmm") == 4 + 4 + 3
        assert not [name for name in names if "wait_tensor" in name]
        ends = [slot["start"] + slot["seconds"] for slot in found["compute"]]
        starts = [slot["start"] for slot in found["compute"]]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))
        assert 0 < sum(slot["seconds"] for slot in found["compute"]) < found["seconds"]
        assert found["page"].count("predicted: ") == len(found["predicted"])
        assert '"reader","measured"]' in found["page"]
        beside = [event for event in found["events"] if event["pid"] == 1 and event["ph"] == "X"]
        assert len(beside) == len(found["measured"]) + len(found["compute"])


def test_one_call_is_no_step(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(profiled, str(tmp_path), 1) == [{}, {}]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(MissingFileError):
        measured_step(path)
    for text in ("", "[]", "{}", '{"traceEvents": [{}]}', '{"traceEvents": []}'):
        path.write_text(text)
        with pytest.raises(FileError, match="trace"):
            measured_step(path)
