"""Order constraints that no argument shows: updates in place, and random numbers.

y = x.sin()
x.add_(1)        must not run before y, nor after z
z = x.cos()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx

from graphopt.graph_utils import find_nodes, is_random
from graphopt.ir.accesses import Accesses
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import source_line
from graphopt.ir.python_calls import PythonCalls


class OrderReason(NamedTuple):
    """The reason why one node must run before another."""

    before: fx.Node
    after: fx.Node
    text: str

    def __str__(self) -> str:
        """Formats the reason, with the user's source line if known."""
        words = f"%{self.after.name} {self.text} %{self.before.name}"
        source = source_line(self.after)
        return words if source is None else f"{words}    from:  {source}"


def hazards(graph: fx.Graph, find: Callable[[fx.Node], Any]) -> Iterator[OrderReason]:
    """Yields pairs of calls that must keep their order, in linear time.

    In graphs of operator overloads, schemas say what is written and viewed, and which operators are
    random. Above that level names do, and which functions are random is not known.

    Args:
        find: the module that a node calls.
    """
    for before, after in pairwise(find_nodes(graph, is_random)):
        yield OrderReason(before, after, "draws random numbers after")
    accesses = Accesses(Effects(graph, PythonCalls(find)), graph)
    for node in graph.nodes:
        for earlier, later, kind in accesses.add(node):
            yield OrderReason(earlier, later, _TEXTS[kind])


_TEXTS = {
    "RAW": "reads what is updated by",
    "WAR": "overwrites what is read by",
    "WAW": "updates what is updated by",
}
"""The description of each kind of hazard."""
