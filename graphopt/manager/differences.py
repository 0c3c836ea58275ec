"""The graph difference that a pass made, kept with its record.

Every pass leaves one, and few are read: the difference is noted at once and formatted when it is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from graphopt.iter_graph import IterGraph
from graphopt.manager.snapshot import NodeRecord, Snapshot, copy_of, noted
from graphopt.readable.diff import ChangedLine, graph_diff, sequence_changes, written_out
from graphopt.readable.plain_text import compact_line
from graphopt.readable.rows import argument, row_of


@dataclass(frozen=True, eq=False, slots=True)
class NotedNode:
    """The content of a node at one time.

    Attributes:
        node: the node, which may have changed since.
        held: its content at that time.
        destination: the destination of its late work, or None.
    """

    node: fx.Node
    held: NodeRecord
    destination: fx.Node | None


@dataclass(frozen=True, eq=False)
class PassDifference:
    """The change that a pass made, formatted when needed. Copies hold the text, since nodes belong
    to their graph.

    Attributes:
        name: of the pass.
        lines: the nodes that differ, with those beside them.
    """

    name: str
    lines: Sequence[ChangedLine[NotedNode]]

    def __str__(self) -> str:
        return written_out(self.lines, _text, _names(self.name))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def difference(
    before: Snapshot, gm: fx.GraphModule, name: str, changed_nodes: Iterable[tuple[fx.Node, Any]]
) -> PassDifference | str:
    """Returns the difference that a pass has made; `str` of it is a unified diff.

    Args:
        changed_nodes: those that `before` says have changed.
    """
    if not before.has_same_graph_object:
        return graph_diff(before.graph, gm, _names(name))
    graph = gm.graph
    late: Mapping[fx.Node, fx.Node] = graph.late if isinstance(graph, IterGraph) else {}
    new = list(graph.nodes)
    changed = {node for node, _ in changed_nodes} | (before.nodes.keys() - set(new))
    marked = before.late.keys() | late.keys()
    changed |= {node for node in marked if before.late.get(node) is not late.get(node)}
    old = [
        NotedNode(node, held, before.late.get(node)) if node in changed else node
        for node, held in before.nodes.items()
    ]

    def note(line: fx.Node | NotedNode | None) -> NotedNode | None:
        if not isinstance(line, fx.Node):
            return line
        held = None if line in changed else before.nodes.get(line)
        return NotedNode(line, noted(line) if held is None else held, late.get(line))

    return PassDifference(name, [(m, note(line)) for m, line in sequence_changes(old, new)])


def _names(name: str) -> tuple[str, str]:
    return f"before {name}", f"after {name}"


def _text(line: NotedNode) -> str:
    graph = fx.Graph(owning_module=line.node.graph.owning_module)

    @cache
    def stand_in(source: fx.Node) -> fx.Node:
        """A node with the name and the metadata of another graph's."""
        made = graph.placeholder(source.name)
        made.meta.update(source.meta)
        return made

    node = copy_of(line.node, line.held, graph, stand_in)
    late = {} if line.destination is None else {node: stand_in(line.destination)}
    if node.op == "output":
        return f"output: {argument(node.args, shorten=False)}"
    return compact_line(row_of(node, late, shorten=False))
