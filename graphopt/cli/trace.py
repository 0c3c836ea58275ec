"""Declares `graphopt trace`."""

from __future__ import annotations

from typing import Annotated

import typer

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
    from graphopt.commands.trace import run_trace

    run_trace(
        schedule,
        microbatches,
        forward=_seconds(forward, "--forward"),
        backward=_seconds(backward, "--backward"),
        ranks=ranks,
        stages=stages,
        transfer=transfer,
    )


def _seconds(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a number, nor numbers separated by commas", param_hint=option
        ) from error
