"""`graphopt trace`, which draws pipeline schedules."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXAMPLES = """
Examples:

    graphopt trace --ranks 4 --microbatches 8

    graphopt trace --schedule zbv --stages 4 --forward 1 --backward 2 --transfer 0.1

    graphopt trace --schedule 1f1b --forward 1,1,2,1 --backward 2,2,4,2
"""


def trace(
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv, dualpipev; all for all"
            " of them."
        ),
    ] = "all",
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 8,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: as the stages need, or 4.")
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="Stages of all ranks. Default: one or two on each rank."),
    ] = None,
    forward: Annotated[
        str,
        typer.Option(
            help="Seconds of a microbatch's forward on one rank, for all of its stages; or of each"
            " stage, separated by commas."
        ),
    ] = "1",
    backward: Annotated[str, typer.Option(help="The same of the backward.")] = "2",
    transfer: Annotated[
        float, typer.Option(min=0.0, help="Seconds until another rank has what is sent to it.")
    ] = 0.0,
) -> None:
    """Show when each stage of a pipeline runs, and how long ranks are idle (the bubble share).

    Predicted from how long stages take, in the order in which torch's schedules run them.

    The exit status is 2 when the schedule cannot be used.
    """

    from graphopt.commands.errors import reported
    from graphopt.errors import ScheduleError
    from graphopt.pipelining.schedule_timeline import SCHEDULES, predict_schedule

    seconds = _seconds(forward, "--forward"), _seconds(backward, "--backward")
    given: dict[str, Any] = {"ranks": ranks, "stages": stages, "transfer": transfer}
    console = Console()
    if schedule != "all":
        with reported("trace"):
            picture = str(predict_schedule(schedule, microbatches, *seconds, **given))
        console.print(picture, markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("ranks", "stages", "step", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    failures: list[str] = []
    for name in SCHEDULES:
        try:
            row = predict_schedule(name, microbatches, *seconds, **given)
        except ScheduleError as error:
            failures.append(str(error))
            table.add_row(name, *[""] * 4, escape(str(error)))
            continue
        count = len({slot.stage for slots in row.ranks for slot in slots})
        step, bubble = f"{row.step_seconds:.4g} s", f"{100 * row.bubble_share:.1f} %"
        table.add_row(name, str(len(row.ranks)), str(count), step, bubble)
    with reported("trace"):
        if len(failures) == len(SCHEDULES):
            raise ScheduleError("\n".join(dict.fromkeys(failures)))
    console.print(table)


def _seconds(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a number, nor numbers separated by commas", param_hint=option
        ) from error
