"""Bubble share of pipeline schedules on local gloo ranks, predicted and measured in one run.

    python benchmarks/bubble.py
    python benchmarks/bubble.py --schedules 1f1b zbv --microbatches 16 --out pictures
    python benchmarks/bubble.py --compute

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import ranks
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures, spread
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage

from graphopt.demo.launch import Event, Reporter
from graphopt.pipelining import Pipe, balanced, pipeline
from graphopt.pipelining.timeline import (
    SCHEDULES,
    ScheduleOrder,
    ScheduleTimeline,
    Slot,
    StageDurations,
    measure_durations,
    predict_schedule,
    record_schedule,
)
from graphopt.pipelining.timeline.html import page
from graphopt.pipelining.timeline.orders import ScheduleKind
from graphopt.pipelining.timeline.trial import Trial

ROWS, WIDTH = 16, 256
LAYERS, LAYER_WIDTH, LAYER_ROWS = 32, 512, 128
"""Of the model of `--compute`."""
WARM_UP_STEPS = 2


class _Wait(torch.autograd.Function):
    """Passes its input on after `forward` seconds, and its gradient after `backward` seconds."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, forward_seconds: float, backward_seconds: float
    ) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(), None, None


class Waiting(nn.Module):
    """A stage that waits where others compute."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, *self.seconds)


def waiting_schedule(kind: ScheduleKind, task: Figures) -> tuple[Any, Callable[[], None]]:
    """A schedule of stages that wait, and a step of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * kind.usual_stages
    forward, half = (task[name] / kind.usual_stages / 1e3 for name in ("forward", "half_backward"))

    def weight_gradients() -> Callable[[], None]:
        return lambda: time.sleep(half)

    def stage(index: int) -> PipelineStage:
        like = torch.empty(ROWS, WIDTH)
        return PipelineStage(
            Waiting(forward, half),
            index,
            total,
            torch.device("cpu"),
            input_args=like.clone().requires_grad_(index > 0),
            output_args=like.clone().requires_grad_(),
            dw_builder=weight_gradients,
        )

    stages = [stage(index) for index in kind.stages_of(rank, size, total)]
    count = task["microbatches"]
    schedule = kind.make(stages, count, loss_fn=lambda output, target: output.sum())
    x = [torch.zeros(ROWS * count, WIDTH)] if rank == 0 else []
    last = {"target": torch.zeros(count)} if any(stage.is_last for stage in stages) else {}
    return schedule, lambda: schedule.step(*x, **last)


def computing_pipe(stages: int) -> Pipe:
    """Equal layers, as many in each stage."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(LAYER_WIDTH, LAYER_WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    x = torch.randn(LAYER_ROWS, LAYER_WIDTH)
    return pipeline(nn.Sequential(*layers), (x,), split_policy=balanced(stages))


def computing_schedule(kind: ScheduleKind, task: Figures) -> tuple[Any, Callable[[], None]]:
    """A schedule of stages that compute, and a step of it."""
    pipe = computing_pipe(dist.get_world_size() * kind.usual_stages)
    trial = Trial(pipe, kind, task["microbatches"])
    return trial.schedule, trial.step


@record
def work(task: Figures, folder: Path) -> None:
    """Run every schedule; rank 0 reports the slots of every step that counts."""
    reporter = Reporter(folder)
    make = computing_schedule if task["compute"] else waiting_schedule
    with ranks.process_group(folder, reporter):
        for name in task["schedules"]:
            schedule, step = make(SCHEDULES[name], task)
            for number in range(WARM_UP_STEPS + task["steps"]):
                dist.barrier()
                with record_schedule(schedule) as recording:
                    step()
                timeline = recording.timeline()
                if reporter.rank == 0 and number >= WARM_UP_STEPS:
                    reporter.send("step", schedule=name, slots=timeline.slots)


def measure(options: argparse.Namespace) -> dict[str, list[ScheduleTimeline]]:
    """The recorded steps of each schedule."""
    task = {
        "schedules": options.schedules,
        "microbatches": options.microbatches,
        "steps": options.steps,
        "compute": options.compute,
        "forward": options.forward,
        "half_backward": options.backward / 2,
    }
    found: dict[str, list[ScheduleTimeline]] = {name: [] for name in options.schedules}

    def on_event(rank: int, event: Event) -> None:
        name, slots = event["schedule"], tuple(Slot(*slot) for slot in event["slots"])
        found[name].append(ScheduleTimeline(name, "measured", options.ranks, slots))

    ranks.run_work(__file__, task, options.ranks, on_event=on_event)
    return found


def predict(name: str, options: argparse.Namespace) -> ScheduleTimeline:
    """From the seconds that stages wait, or that they take alone in this process."""
    kind = SCHEDULES[name]
    stages = options.ranks * kind.usual_stages
    order = ScheduleOrder.named(name, options.ranks, stages, options.microbatches)
    if options.compute:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return predict_schedule(order, measure_durations(computing_pipe(stages)))
    share = 1e3 * kind.usual_stages
    durations = StageDurations.given(
        [options.forward / share] * stages, [options.backward / share] * stages
    )
    return predict_schedule(order, durations)


def figures(predicted: ScheduleTimeline, measured: list[ScheduleTimeline]) -> Figures:
    """Of one schedule; shares are of the ranks' time, seconds are of a step."""
    return {
        "predicted": {"bubble": predicted.bubble_share, "seconds": predicted.step_seconds},
        "measured": {
            "bubble": spread([timeline.bubble_share for timeline in measured]),
            "seconds": spread([timeline.step_seconds for timeline in measured]),
        },
    }


def table_of(results: dict[str, Figures], options: argparse.Namespace) -> Table:
    """A row for each schedule."""
    stages = "stages that compute" if options.compute else "stages that wait"
    table = Table(
        title=f"{options.ranks} gloo ranks, {options.microbatches} microbatches, {stages},"
        f" {options.steps} steps"
    )
    table.add_column("schedule")
    for heading in ("predicted", "measured", "quartiles", "step", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in results.items():
        predicted, measured = found["predicted"], found["measured"]
        low, high = measured["bubble"]["quartiles"]
        table.add_row(
            name,
            f"{predicted['bubble']:.1%}",
            f"{measured['bubble']['median']:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{1e3 * predicted['seconds']:.1f} ms",
            f"{1e3 * measured['seconds']['median']:.1f} ms",
        )
    return table


def write_pictures(
    out: Path, predicted: dict[str, ScheduleTimeline], steps: dict[str, list[ScheduleTimeline]]
) -> None:
    """One page for each schedule: the prediction, and the step of median length."""
    out.mkdir(parents=True, exist_ok=True)
    for name, timelines in steps.items():
        middle = median([timeline.step_seconds for timeline in timelines])
        usual = min(timelines, key=lambda timeline: abs(timeline.step_seconds - middle))
        (out / f"{name}.html").write_text(page([predicted[name], usual]), encoding="utf-8")


def parse() -> argparse.Namespace:
    """The options."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="that count, of each schedule")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--forward", type=float, default=20.0, help="ms on one rank")
    parser.add_argument("--backward", type=float, default=40.0, help="ms on one rank")
    parser.add_argument("--compute", action="store_true", help="stages compute instead of waiting")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write pictures as well")
    return parser.parse_args()


def main() -> None:
    """Predict, measure, and print a table."""
    options = parse()
    if ranks.works(options, work):
        return
    predicted = {name: predict(name, options) for name in options.schedules}
    with ranks.failures_shown():
        steps = measure(options)
    results = {name: figures(predicted[name], steps[name]) for name in options.schedules}
    Console().print(table_of(results, options))
    if options.json:
        described = {"torch": torch.__version__, "options": vars(options), "schedules": results}
        options.json.write_text(json.dumps(described, indent=2, default=str))
    if options.out:
        write_pictures(options.out, predicted, steps)


if __name__ == "__main__":
    main()
