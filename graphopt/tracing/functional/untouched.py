"""Which operators of a trace are the same ones in the captured dialect.

Most of a trace is functional already. An operator that makes new tensors is, whoever writes to them
later; a view is where nobody in the whole trace writes to its memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.known_nodes import is_sized
from graphopt._compat.remembering import written_as_it_is
from graphopt.graph_utils import is_operator, written
from graphopt.ir.metadata import has_value, known_value, storages_of
from graphopt.tracing.decisions import SIZED
from graphopt.tracing.exactness import spectra, statistics
from graphopt.tracing.scalars import numbers
from graphopt.tracing.scalars.functions import PYTHON_FUNCTIONS

_OF_NUMBERS = frozenset(numbers.ARITHMETIC) | PYTHON_FUNCTIONS | {operator.pow}


class Untouched:
    """Of a graph as it was traced."""

    def __init__(self, graph: fx.Graph) -> None:
        self._written: set[int] = set()
        for node in graph.nodes:
            for target in _perhaps_written(node):
                self._written |= storages_of(target)

    def stays(self, node: fx.Node) -> bool:
        """Whether a node is the same one in the captured dialect: its operator is one that
        functionalization would call as it is, and all its sizes are known."""
        if node.op != "call_function" or not has_value(node) or SIZED in node.meta:
            return False
        if not is_sized(known_value(node)):
            return False
        if node.target in _OF_NUMBERS:
            return isinstance(known_value(node), torch.SymFloat) and not _has_integers(node)
        if not written_as_it_is(node.target) or _has_integers(node):
            return False
        if is_operator(node.target, *spectra.OPERATORS) or node.target in statistics.KERNELS:
            return False
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            return False
        view: bool = node.target.is_view  # type: ignore[union-attr]
        return not view or self._written.isdisjoint(storages_of(node))


def _has_integers(node: fx.Node) -> bool:
    """Whether a node takes integers or truths that are computed."""
    kinds = (torch.SymInt, torch.SymBool)
    return any(isinstance(known_value(source), kinds) for source in node.all_input_nodes)


def _perhaps_written(node: fx.Node) -> Sequence[fx.Node]:
    """What a node writes to; anything that it takes where it may do so in secret, as batch norm
    does."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if isinstance(node.target, _compat.OpOverload) and _compat.schema_of(node.target).is_mutable:
        return written(node)
    as_it_is = written_as_it_is(node.target) and node.target not in statistics.KERNELS
    return () if as_it_is else node.all_input_nodes
