"""What `graphopt show` prints of a graph, which is saved with it."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from graphopt.listing import Listing
from graphopt.readable import listing_of
from graphopt.schedule import collectives_text, simulate


def full_listing(graph_module: fx.GraphModule) -> Listing:
    """A graph as rows, with what its collectives take.

    >>> from graphopt.saved import full_listing
    >>> full_listing(gm).collectives.startswith("collectives, predicted:")
    True
    """
    listing = listing_of(graph_module)
    return replace(listing, collectives=collectives_text(simulate(graph_module)))


def listing_if_possible(graph_module: fx.GraphModule) -> Listing | None:
    """The same; None for a graph that cannot be shown, since a graph may be saved because something
    is wrong with it."""
    try:
        return full_listing(graph_module)
    except Exception:  # what is wrong with it is not known
        return None
