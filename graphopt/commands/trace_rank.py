"""A rank of `graphopt trace --measure`: `python -m graphopt.commands.trace_rank FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from graphopt.commands.trace_pipe import PipeSource
from graphopt.demo.launch import RankTask, Reporter
from graphopt.pipelining import Pipe
from graphopt.pipelining.timeline import ScheduleTimeline, record_schedule
from graphopt.pipelining.timeline.orders import find_schedule
from graphopt.pipelining.timeline.trial import Trial

STEPS, WARM_UP = 5, 2
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class TraceTask(RankTask):
    """Arguments of the ranks of `graphopt trace --measure`.

    Attributes:
        pipe: `module_or_file.py:function`.
        schedules: names, with the number of stages of each.
    """

    pipe: str
    schedules: Sequence[tuple[str, int]]
    microbatches: int


@record
def main() -> None:
    """Run every schedule, and let rank 0 report the step of median length."""
    folder = Path(sys.argv[1])
    task, reporter = TraceTask.load(folder), Reporter(folder)
    store = dist.FileStore(str(folder / "rendezvous"), reporter.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=reporter.rank, world_size=reporter.ranks, timeout=_TIMEOUT
    )
    source = PipeSource(task.pipe)
    for name, stages in task.schedules:
        pipe = source.make(stages)
        timeline = measure(pipe, name, task.microbatches)
        if reporter.rank == 0:
            reporter.send("measured", schedule=name, slots=timeline.slots)
    dist.barrier()  # nobody leaves while another still uses its connections
    dist.destroy_process_group()


def measure(pipe: Pipe, name: str, microbatches: int) -> ScheduleTimeline:
    """The step of median length, of a few after the first ones."""
    trial = Trial(pipe, find_schedule(name), microbatches)
    timelines = []
    for number in range(WARM_UP + STEPS):
        with record_schedule(trial.schedule) as recording:
            trial.step()
        if number >= WARM_UP:
            timelines.append(recording.timeline())
    timelines.sort(key=lambda timeline: timeline.step_seconds)
    return timelines[len(timelines) // 2]


if __name__ == "__main__":
    main()
