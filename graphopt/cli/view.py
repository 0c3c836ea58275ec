"""`graphopt view`, which writes a saved graph as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.options import GraphFile

EXAMPLES = """
Examples:

    graphopt view step.pt

    graphopt view optimized.pt -o step.html
"""


def view(
    file: GraphFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write here. Default: FILE.html.", show_default=False),
    ] = None,
) -> None:
    """Write one page of HTML that shows a step: phases, modules, collectives, passes, timeline.

    The page needs nothing else, and draws only what is in view.
    """
    from graphopt.commands.errors import reported
    from graphopt.ir.user_files import place, write
    from graphopt.readable import readable_bytes
    from graphopt.saved import load_description
    from graphopt.viewing import view_page

    out = out or file.with_suffix(".html")
    with reported("view"):
        text = view_page(load_description(file), file.name)
        write(place(out), text)
    typer.echo(f"{out}: {readable_bytes(len(text.encode()))}")
