"""Implementation of `graphopt trace`, which draws pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphopt.commands.errors import reported
from graphopt.ir.user_files import make_folder, place
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

_USUAL_RANKS = 4


def run_trace(
    schedule: str,
    *,
    microbatches: int,
    ranks: int | None,
    stages: int | None,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: float,
    out: Path | None,
) -> None:
    """Prints the figures of one schedule or of all, and writes their traces.

    Args:
        schedule: a name, or "all".
        forward, backward: seconds on one rank, or of each stage.
        transfer: seconds between ranks.
        out: a folder for files.
    """
    if stages is None:
        stages = next((len(s) for s in (forward, backward) if len(s) > 1), None)

    def predicted(kind: ScheduleKind) -> ScheduleTimeline:
        used_ranks, used_stages = _layout(kind, ranks, stages)
        order = ScheduleOrder.named(kind.name, used_ranks, used_stages, microbatches)
        durations = StageDurations(
            _of_each_stage(forward, used_ranks, used_stages),
            _of_each_stage(backward, used_ranks, used_stages),
        )
        return predict_schedule(order, durations, transfer=transfer)

    console = Console()
    with reported("trace"):
        folder = None if out is None else place(out)
        chosen = SCHEDULES.values() if schedule == "all" else [find_schedule(schedule)]
        rows = {kind.name: _picture_or_reason(kind, predicted) for kind in chosen}
        pictures = {n: row for n, row in rows.items() if isinstance(row, ScheduleTimeline)}
        if not pictures:
            raise ScheduleError("\n".join(dict.fromkeys(map(str, rows.values()))))
    if schedule != "all":
        console.print(*map(str, pictures.values()), markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows))
    if folder is not None:
        with reported("trace"):
            make_folder(folder)
            for name, picture in pictures.items():
                picture.save_chrome_trace(folder / f"{name}.json")
        console.print(f"saved: {folder}", markup=False, highlight=False, soft_wrap=True)


def _picture_or_reason(
    kind: ScheduleKind, predicted: Callable[[ScheduleKind], ScheduleTimeline]
) -> ScheduleTimeline | str:
    try:
        return predicted(kind)
    except ScheduleError as error:
        return str(error)


def _layout(kind: ScheduleKind, ranks: int | None, stages: int | None) -> tuple[int, int]:
    """The numbers of ranks and stages, with defaults for those left out."""
    if stages is None:
        stages = (ranks or _USUAL_RANKS) * kind.usual_stages
    if ranks is None:
        ranks = max(1, stages // kind.usual_stages)
    kind.check(ranks, stages)
    return ranks, stages


def _of_each_stage(seconds: tuple[float, ...], ranks: int, stages: int) -> tuple[float, ...]:
    """The seconds of each stage; one number is a rank's time, divided among its stages."""
    return seconds if len(seconds) > 1 else (seconds[0] * ranks / stages,) * stages


def _table(rows: Mapping[str, ScheduleTimeline | str]) -> Table:
    """A table of schedules, each with its figures or the reason for having none."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("ranks", "stages", "step", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(isinstance(row, str) for row in rows.values()):
        table.add_column("", overflow="fold")
    for name, row in rows.items():
        if isinstance(row, str):
            table.add_row(name, *[""] * 4, escape(row))
            continue
        stages = sum(len(figures.stages) for figures in row.ranks)
        figures = (seconds_text(row.step_seconds), percent(row.bubble_share))
        table.add_row(name, str(row.num_ranks), str(stages), *figures)
    return table
