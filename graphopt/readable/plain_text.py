"""Graphs as plain text, to read or to compare."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphopt.graph_utils import is_collective, is_operator
from graphopt.graph_utils.nodes import graph_of
from graphopt.iter_graph import IterGraph
from graphopt.readable.columns import heading, listing_text, readable_bytes
from graphopt.readable.listing import MARKS, Listing, ListingRow
from graphopt.readable.rows import sections, sent_bytes


def graph_text(
    graph: fx.GraphModule | fx.Graph,
    *,
    bytes: bool = True,
    places: bool = True,
    phase: str | None = None,
) -> str:
    """A graph as text to read: a summary, then one row per node under headings for the phases.

    A row says name, operator and arguments, dtype and shape, bytes, module path, source line, and
    which pass made the node. Marks at its left show launches, waits, updates and late nodes.

    Args:
        graph: the graph to show, which is not changed.
        bytes: say how large values are.
        places: say where nodes come from.
        phase: show the calls of this phase only.

    >>> from graphopt.readable import graph_text
    >>> print(graph_text(gm).splitlines()[0])
    48 nodes, 2 collectives of 40 B in all, 2 state updates, 0 late nodes
    """
    return listing_text(listing_of(graph, phase=phase), bytes=bytes, places=places)


def listing_of(graph: fx.GraphModule | fx.Graph, *, phase: str | None = None) -> Listing:
    """The rows of a graph, or of one phase, without the costs of collectives.

    >>> from graphopt.readable import listing_of
    >>> [title for title, rows in listing_of(gm, phase="forward").sections]
    ['forward']
    """
    plain = graph_of(graph)
    return Listing(list(summary(plain)), list(sections(plain, phase=phase)))


def compact_text(graph: fx.GraphModule | fx.Graph) -> str:
    """A graph as text to compare: all arguments, no padding, no lines or paths of the user's
    source.

    >>> from graphopt.readable import compact_text
    >>> "%sum_1 = aten.sum.default(%addmm)  f32[]" in compact_text(gm)
    True
    """
    lines = []
    for title, rows in sections(graph_of(graph), shorten=False):
        lines.append(heading(title))
        lines += map(compact_line, rows)
    return "\n".join(lines) + "\n"


def compact_line(row: ListingRow) -> str:
    """One line of `compact_text`: the row of a single node."""
    parts = (f"{row.marks} {row.text}".strip(), row.shape, row.note)
    return "  ".join(part for part in parts if part)


def summary(graph: fx.Graph) -> Iterator[str]:
    """Lines about a graph's size, and a legend of the marks in its rows."""
    nodes = list(graph.nodes)
    collectives = [node for node in nodes if is_collective(node)]
    sent = readable_bytes(sum(map(sent_bytes, collectives)))
    copies = sum(is_operator(node.target, "aten::copy_") for node in nodes)
    late = len(graph.late) if isinstance(graph, IterGraph) else 0
    yield ", ".join(
        [
            counted(len(nodes), "node"),
            counted(len(collectives), "collective") + (f" of {sent} in all" if collectives else ""),
            counted(copies, "state update"),
            counted(late, "late node"),
        ]
    )
    yield "marks: " + ", ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items())


def counted(number: int, what: str) -> str:
    """A number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
