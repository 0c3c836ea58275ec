"""The nodes that a pass edited itself, for the error that refuses it.

Where values begin to differ is often not where the mistake was made: an `mm` whose operands are
exchanged shows in the update of a weight. So an error names what the pass has put in or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt.verify.problems import describe

_SHOWN = 3


@dataclass(frozen=True)
class Edits:
    """What a pass put into a graph and changed there, readers of new nodes left out.

    Attributes:
        names: of the nodes, in the order of the graph.
        lines: the first of them as text, with what they were before.
    """

    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The edited nodes in a few words, or nothing if there are none."""
        if not self.names:
            return ""
        count = len(self.names) - 1
        more = f" and {count} other{'s' * (count > 1)}" if count else ""
        return f"%{self.names[0]}{more}"


def edits(before: fx.Graph, after: fx.Graph) -> Edits:
    """Compares two graphs by the names of their nodes."""
    known = {node.name: node for node in before.nodes}
    new = {node for node in after.nodes if node.name not in known}
    found = [node for node in after.nodes if _is_own(node, known.get(node.name), new)]
    lines = [line for node in found[:_SHOWN] for line in _lines(node, known.get(node.name))]
    return Edits(tuple(node.name for node in found), tuple(lines))


def _is_own(node: fx.Node, was: fx.Node | None, new: set[fx.Node]) -> bool:
    if node.op in ("placeholder", "output") or any(n in new for n in node.all_input_nodes):
        return False
    return was is None or _call(node) != _call(was)


def _call(node: fx.Node) -> Any:
    return node.target, str(node.args), str(node.kwargs)


def _lines(node: fx.Node, was: fx.Node | None) -> Sequence[str]:
    now = describe(node)
    return [f"{now}   (new)"] if was is None else [now, f"before it was {describe(was)}"]
