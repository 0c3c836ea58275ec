"""Declares `graphopt trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

    graphopt trace --ranks 4 --microbatches 8

    graphopt trace --schedule zbv --stages 4 --forward 1 --backward 2 --transfer 0.1

    graphopt trace --schedule 1f1b --forward 1,1,2,1 --backward 2,2,4,2 --out pictures

    graphopt trace my_model.py:make_pipe --ranks 2 --out pictures

make_pipe(stages) returns what graphopt.pipelining.pipeline makes, with so many stages. It may also
take nothing.
"""


def trace(
    pipe: Annotated[
        str | None,
        typer.Argument(
            help="A function that makes a Pipe: module:function or file.py:function.",
            metavar="FUNCTION",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv, dualpipev; all for all"
            " of them; or a file that torch's schedules wrote (FILE.csv)."
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
        str | None,
        typer.Option(
            help="Seconds of a microbatch's forward on one rank, for all of its stages; or of each"
            " stage, separated by commas. Default: 1.",
            show_default=False,
        ),
    ] = None,
    backward: Annotated[
        str | None, typer.Option(help="The same of the backward. Default: 2.", show_default=False)
    ] = None,
    transfer: Annotated[
        float, typer.Option(min=0.0, help="Seconds until another rank has what is sent to it.")
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write NAME.html and Chrome traces (NAME.predicted.json) here.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Show when each stage of a pipeline runs, and how long ranks are idle (the bubble share).

    Predicted from how long stages take, in the order in which torch's schedules run them. Stages of
    a pipe are measured one by one in this process; without a pipe, their seconds are given.

    The exit status is 2 when the schedule or the pipe cannot be used.
    """
    from graphopt.commands.trace import TraceArguments, run_trace

    run_trace(
        TraceArguments(
            pipe=pipe,
            schedule=schedule,
            microbatches=microbatches,
            ranks=ranks,
            stages=stages,
            forward=_seconds(forward, "--forward"),
            backward=_seconds(backward, "--backward"),
            transfer=transfer,
            out=out,
        )
    )


def _seconds(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a number, nor numbers separated by commas", param_hint=option
        ) from error
