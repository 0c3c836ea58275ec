"""Implementation of `graphopt trace`, which draws pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphopt.commands.errors import reported
from graphopt.pipelining.timeline import (
    SCHEDULES,
    ScheduleError,
    ScheduleOrder,
    ScheduleTimeline,
    StageDurations,
    predict_schedule,
)
from graphopt.pipelining.timeline.orders import ScheduleKind, find_schedule
from graphopt.pipelining.timeline.picture import percent, seconds_text
from graphopt.runtime.places import make_folder, place

_USUAL_RANKS = 4


@dataclass(frozen=True)
class TraceArguments:
    """The command line arguments of `graphopt trace`.

    Attributes:
        schedule: a name, or "all".
        forward, backward: seconds on one rank, or of each stage.
        transfer: seconds between ranks.
        out: a folder for files.
    """

    schedule: str
    microbatches: int
    ranks: int | None
    stages: int | None
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: float
    out: Path | None


@dataclass(frozen=True)
class SchedulePicture:
    """The timeline of one schedule, or the reason for having none."""

    name: str
    stages: int = 0
    picture: ScheduleTimeline | None = None
    reason: str = ""


def run_trace(request: TraceArguments) -> None:
    """Prints the figures of the schedules, and writes their traces."""
    console = Console()
    with reported("trace"):
        out = None if request.out is None else place(request.out)
        rows = _predicted(request)
    if len(rows) == 1:
        console.print(str(rows[0].picture), markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows))
    if out is not None:
        with reported("trace"):
            make_folder(out)
            for row in rows:
                if row.picture is not None:
                    row.picture.save_chrome_trace(out / f"{row.name}.json")
        console.print(f"saved: {out}", markup=False, highlight=False, soft_wrap=True)


def _predicted(request: TraceArguments) -> list[SchedulePicture]:
    if request.schedule != "all":
        return [_named(find_schedule(request.schedule), request)]
    rows = [_named_or_reason(kind, request) for kind in SCHEDULES.values()]
    if not any(row.picture for row in rows):
        raise ScheduleError("\n".join(dict.fromkeys(row.reason for row in rows)))
    return rows


def _named_or_reason(kind: ScheduleKind, request: TraceArguments) -> SchedulePicture:
    try:
        return _named(kind, request)
    except ScheduleError as error:
        return SchedulePicture(kind.name, reason=str(error))


def _named(kind: ScheduleKind, request: TraceArguments) -> SchedulePicture:
    ranks, stages = _layout(kind, request)
    order = ScheduleOrder.named(kind.name, ranks, stages, request.microbatches)
    durations = StageDurations(
        _of_each_stage(request.forward, ranks, stages),
        _of_each_stage(request.backward, ranks, stages),
    )
    picture = predict_schedule(order, durations, transfer=request.transfer)
    return SchedulePicture(kind.name, stages, picture)


def _layout(kind: ScheduleKind, request: TraceArguments) -> tuple[int, int]:
    """The numbers of ranks and stages, with defaults for those left out."""
    ranks, stages, usual = request.ranks, request.stages, kind.usual_stages
    if stages is None:
        lists = [len(s) for s in (request.forward, request.backward) if len(s) > 1]
        stages = lists[0] if lists else (ranks or _USUAL_RANKS) * usual
    if ranks is None:
        ranks = max(1, stages // usual)
    kind.check(ranks, stages)
    return ranks, stages


def _of_each_stage(seconds: tuple[float, ...], ranks: int, stages: int) -> tuple[float, ...]:
    """The seconds of each stage; one number is a rank's time, divided among its stages."""
    return seconds if len(seconds) > 1 else (seconds[0] * ranks / stages,) * stages


def _table(rows: Sequence[SchedulePicture]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("ranks", "stages", "step", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(row.reason for row in rows):
        table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(row.name, *_cells(row), escape(row.reason))
    return table


def _cells(row: SchedulePicture) -> list[str]:
    picture = row.picture
    if picture is None:
        return [""] * 4
    figures = [seconds_text(picture.step_seconds), percent(picture.bubble_share)]
    return [str(picture.num_ranks), str(row.stages), *figures]
