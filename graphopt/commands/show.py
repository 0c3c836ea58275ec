"""Implementation of `graphopt show`, which prints a saved graph, or how two graphs differ."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.commands.errors import reported
from graphopt.readable import graph_diff, listing_of
from graphopt.readable.terminal import print_diff, print_listing
from graphopt.saved import load_description
from graphopt.schedule import collectives_text, simulate


def run_show(file: Path, phase: str | None, other: Path | None) -> None:
    """Prints the graph in `file`, or its difference to the graph in `other`."""
    console = Console()
    with reported("show"):
        graph = load_description(file)
        compared = None if other is None else load_description(other)
    if compared is None:
        print_listing(listing_of(graph, phase=phase), console)
        if phase is None:
            console.out(collectives_text(simulate(graph)), end="", highlight=False)
        return
    difference = graph_diff(graph, compared, (str(file), str(other)))
    if difference:
        print_diff(difference, console)
    else:
        console.print("no difference")
