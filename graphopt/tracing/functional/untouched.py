"""Which operators of a trace are the same ones in the captured dialect.

Most of a trace is functional already. An operator that makes new tensors is, whoever writes to them
later; a view is where nobody in the whole trace writes to its memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from graphopt import _compat
from graphopt._compat.remembering import written_as_it_is
from graphopt.graph_utils import is_operator, written
from graphopt.ir.metadata import storages_of
from graphopt.tracing.exactness import spectra, statistics


class Untouched:
    """Of a graph as it was traced."""

    def __init__(self, graph: fx.Graph) -> None:
        self._written: set[int] = set()
        for node in graph.nodes:
            for target in _perhaps_written(node):
                self._written |= storages_of(target)

    def stays(self, node: fx.Node) -> bool:
        """Whether functionalization would call the operator of a node as it is."""
        if node.op != "call_function" or not written_as_it_is(node.target):
            return False
        if is_operator(node.target, *spectra.OPERATORS) or node.target in statistics.KERNELS:
            return False
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            return False
        view: bool = node.target.is_view  # type: ignore[union-attr]
        return not view or self._written.isdisjoint(storages_of(node))


def _perhaps_written(node: fx.Node) -> Sequence[fx.Node]:
    """What a node writes to; anything that it takes where it may do so in secret, as batch norm
    does."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if isinstance(node.target, _compat.OpOverload) and _compat.schema_of(node.target).is_mutable:
        return written(node)
    as_it_is = written_as_it_is(node.target) and node.target not in statistics.KERNELS
    return () if as_it_is else node.all_input_nodes
