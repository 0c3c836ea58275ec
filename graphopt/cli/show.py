"""`graphopt show`, which prints a saved graph, or how two graphs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from graphopt.cli.options import GraphFile, Phase

EXAMPLES = """
Examples:

    graphopt show step.pt

    graphopt show step.pt --phase communication

    graphopt show step.pt --diff optimized.pt
"""


def show(
    file: GraphFile,
    phase: Annotated[Phase | None, typer.Option(help="Show this part of the step only.")] = None,
    diff: Annotated[
        Path | None, typer.Option(help="Show how the graph in this file differs.", metavar="OTHER")
    ] = None,
) -> None:
    """Print a saved graph, or the difference between two, in colour on a terminal.

    Rows are grouped by phase and marked where collectives are launched and waited for, state is
    updated, and nodes run one iteration late. Below, for each collective: bytes, parameters, who
    waits for it and how long it takes, by presets (graphopt.cost), which know neither your device
    nor your link.
    """
    if phase is not None and diff is not None:
        raise typer.BadParameter("--phase does not go with --diff", param_hint="--phase")
    from graphopt.commands.errors import reported
    from graphopt.readable import graph_diff, listing_of
    from graphopt.readable.terminal import print_diff, print_listing
    from graphopt.saved import load_description
    from graphopt.schedule import collectives_text, simulate

    console = Console()
    with reported("show"):
        graph = load_description(file)
        other = None if diff is None else load_description(diff)
    if other is not None:
        difference = graph_diff(graph, other, (str(file), str(diff)))
        print_diff(difference or "no difference\n", console)
        return
    print_listing(listing_of(graph, phase=None if phase is None else phase.value), console)
    if phase is None:
        console.out(collectives_text(simulate(graph)), end="", highlight=False)
