"""Declares `graphopt view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

    graphopt view step.pt

    graphopt view optimized.pt --dumps dumps -o step.html

    graphopt view trace.json
"""


def view(
    file: Annotated[
        Path,
        typer.Argument(
            help="A graph saved by graphopt.saved.save_graph, or a trace (FILE.json).",
            metavar="FILE",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write here. Default: FILE.html.", show_default=False),
    ] = None,
    dumps: Annotated[
        Path | None,
        typer.Option(
            help="Show what passes changed by the files in this folder of `optimize --dump`, in"
            " place of what the graph's records keep of it."
        ),
    ] = None,
) -> None:
    """Write one page of HTML that shows a step: phases, modules, collectives, passes, timeline.

    The page needs nothing else, and draws only what is in view. Of a trace in the trace event
    format, as `trace --out` and `Timeline.save_chrome_trace` write, it shows the timeline.
    """
    from graphopt.commands.view import run_view

    run_view(file, out, dumps)
