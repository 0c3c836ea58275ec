"""`graphopt view`, which writes a saved graph or a trace as an HTML page."""

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
    format, as `Timeline.save_chrome_trace` writes, it shows the timeline.
    """
    from graphopt.commands.errors import reported
    from graphopt.ir.user_files import place, read_text, write
    from graphopt.readable import readable_bytes
    from graphopt.saved import load_description
    from graphopt.viewing import trace_page, view_page

    out = out or file.with_suffix(".html")
    with reported("view"):
        if file.suffix == ".json":
            text = trace_page(read_text(file), file.name)
        else:
            diffs = {} if dumps is None else _diffs(dumps)
            text = view_page(load_description(file), file.name, diffs)
        write(place(out), text)
    typer.echo(f"{out}: {readable_bytes(len(text.encode()))}")


def _diffs(folder: Path) -> dict[str, list[str]]:
    """Returns the change that each pass made, by its name, from the files of a `dump_dir`."""
    from graphopt.errors import MissingFileError
    from graphopt.ir.user_files import place, read_text

    found = sorted(place(folder).glob("after_*.diff"))
    if not found:
        raise MissingFileError(
            f"{folder} holds no after_PASS.diff: `graphopt optimize --dump` and"
            " dump_dir= write these"
        )
    return {path.stem.removeprefix("after_"): read_text(path).splitlines() for path in found}
