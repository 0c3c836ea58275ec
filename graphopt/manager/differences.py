"""What a pass changed, kept with its record: the page of a step shows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
    if not before.is_of_the_same_graph:
        return graph_diff(before.graph, gm, names)
    old, late = before.former_nodes()
    if isinstance(gm.graph, IterGraph):
        late = {**late, **gm.graph.late}
    return sequence_diff(old, list(gm.graph.nodes), partial(_text, late=late), names)


def _text(node: fx.Node, late: Mapping[fx.Node, fx.Node]) -> str:
    if node.op == "output":
        return f"output: {argument(node.args, shorten=False)}"
    return compact_line(row_of(node, late, shorten=False))
