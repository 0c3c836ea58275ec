"""What a pass changed, kept with its record: the page of a step shows it."""

from __future__ import annotations

from torch import fx

from graphopt.iter_graph import IterGraph
from graphopt.manager.snapshot import Snapshot
from graphopt.readable.diff import graph_diff, sequence_diff
from graphopt.readable.rows import argument, row_of
from graphopt.readable.text import compact_line


def difference(before: Snapshot, gm: fx.GraphModule, name: str) -> str:
    """The difference that a pass has made, as unified text.

    Rows are written out only where they differ: that takes a small part of the time of
    `graph_diff`, and every pass of every step does it.
    """
    names = f"before {name}", f"after {name}"
    copies = before.correspondence
    if copies is None:
        return graph_diff(before.graph, gm, names)
    for node in before.edited_nodes():
        del copies[node]
    old, new = list(before.graph.nodes), [copies.get(node, node) for node in gm.graph.nodes]
    return sequence_diff(old, new, _text, names)


def _text(node: fx.Node) -> str:
    if node.op == "output":
        return f"output: {argument(node.args, shorten=False)}"
    late = node.graph.late if isinstance(node.graph, IterGraph) else {}
    return compact_line(row_of(node, late, shorten=False))
