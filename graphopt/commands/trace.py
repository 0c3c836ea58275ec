"""Implementation of `graphopt trace`, which draws pipeline schedules."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphopt.commands.errors import reported
from graphopt.errors import ScheduleError
from graphopt.pipelining.schedule_timeline import SCHEDULES, ScheduleTimeline, predict_schedule


def run_trace(schedule: str, microbatches: int, **options: Any) -> None:
    """Prints the picture and figures of one schedule, or the figures of all.

    Args:
        schedule: a name, or "all".
        options: those of `predict_schedule`.
    """
    names = SCHEDULES if schedule == "all" else [schedule]
    found: dict[str, ScheduleTimeline | ScheduleError] = {}
    for name in names:
        try:
            found[name] = predict_schedule(name, microbatches, **options)
        except ScheduleError as error:
            found[name] = error
    pictures = [each for each in found.values() if isinstance(each, ScheduleTimeline)]
    with reported("trace"):
        if not pictures:
            raise ScheduleError("\n".join(dict.fromkeys(map(str, found.values()))))
    console = Console()
    if schedule != "all":
        console.print(str(pictures[0]), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("ranks", "stages", "step", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, row in found.items():
        if isinstance(row, ScheduleError):
            table.add_row(name, *[""] * 4, escape(str(row)))
            continue
        stages = len({slot.stage for slots in row.ranks for slot in slots})
        step, bubble = f"{row.step_seconds:.4g} s", f"{100 * row.bubble_share:.1f} %"
        table.add_row(name, str(len(row.ranks)), str(stages), step, bubble)
    console.print(table)
