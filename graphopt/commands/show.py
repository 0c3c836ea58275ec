"""`graphopt show`: print a saved graph and what its collectives cost, or how two graphs differ."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.commands.errors import reported
from graphopt.listing import Listing, read_listing
from graphopt.listing.terminal import print_diff, print_listing
from graphopt.runtime.places import place


def run_show(file: Path, phase: str | None, other: Path | None) -> None:
    """Print the graph in `file`, or its difference to the graph in `other`."""
    console = Console()
    if other is None:
        with reported("show"):
            listing = _listing(file)
        print_listing(listing if phase is None else listing.of_phase(phase), console)
        return
    with reported("show"):
        difference = _difference(file, other)
    if difference:
        print_diff(difference, console)
    else:
        console.print("no difference")


def _listing(file: Path) -> Listing:
    """The one that was saved with a graph, which needs no torch, or a new one of the graph."""
    saved = read_listing(place(file))
    if saved is not None:
        return saved
    from graphopt.saved import full_listing, load_description

    return full_listing(load_description(file))


def _difference(file: Path, other: Path) -> str:
    from graphopt.readable import graph_diff
    from graphopt.saved import load_description

    graph, compared = load_description(file), load_description(other)
    return graph_diff(graph, compared, (str(file), str(other)))
