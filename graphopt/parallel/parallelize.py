"""The `parallelize` stage between capture and passes: replaces markers by communication.

capture:       g ──▶ reduce_gradient(g, "w") ──▶ optimizer
parallelize:   g ──▶ what a kind of parallelism makes of it ──▶ optimizer, launched right after g
"""

from __future__ import annotations

from operator import attrgetter

from torch import fx

from graphopt.graph_utils import eliminate_dead_code
from graphopt.ir.operators import calls_of
from graphopt.parallel.kinds import Parallel
from graphopt.parallel.launching import place_launches
from graphopt.parallel.markers import forget_unread


def communicates(graph: fx.Graph) -> bool:
    """True if a captured graph has markers, or collectives that the user's step calls."""
    return bool(calls_of(graph, attrgetter("marker")) or calls_of(graph, attrgetter("collective")))


def parallelize(graph_module: fx.GraphModule, parallel: Parallel) -> int:
    """Expands all markers of a captured graph, and places the launches.

    Args:
        graph_module: as it was captured; edited in place.
        parallel: the kind of parallelism that says what markers become.

    Returns:
        How many markers there were.
    """
    graph = graph_module.graph
    if not communicates(graph):
        return 0
    forget_unread(graph)
    expanded = parallel.expand(graph)
    eliminate_dead_code(graph)  # what nobody reads any more
    place_launches(graph)
    graph.lint()
    graph_module.recompile()
    return expanded
