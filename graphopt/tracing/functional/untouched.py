"""Classification of traced operators: functional already, or possibly writing."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.cached_tracing import written_as_it_is
from graphopt._compat.known_nodes import is_sized
from graphopt.graph_utils import is_operator, written
from graphopt.ir.metadata import has_value, known_value
from graphopt.tracing.decisions import SIZED
from graphopt.tracing.exactness import spectra, statistics
from graphopt.tracing.scalars import numbers
from graphopt.tracing.scalars.functions import PYTHON_FUNCTIONS

_OF_NUMBERS = frozenset(numbers.ARITHMETIC) | PYTHON_FUNCTIONS | {operator.pow}


def is_functional(node: fx.Node) -> bool:
    """True if functionalization would leave a node's operator as it is, unless it is a view of
    written memory or has unknown sizes."""
    if node.op != "call_function" or SIZED in node.meta:
        return False
    if not (has_value(node) or _gives_nothing(node)):
        return False
    if not is_sized(known_value(node)) or _has_integers(node):
        return False
    if node.target in _OF_NUMBERS:
        return isinstance(known_value(node), torch.SymFloat)
    if not written_as_it_is(node.target) or is_operator(node.target, *spectra.OPERATORS):
        return False
    sources = node.all_input_nodes
    return node.target not in statistics.KERNELS and all(s.op != "get_attr" for s in sources)


def _gives_nothing(node: fx.Node) -> bool:
    """True if an operator only checks its arguments, as `aten::_linalg_check_errors` does."""
    target = node.target
    return isinstance(target, _compat.OpOverload) and not _compat.schema_of(target).returns


def _has_integers(node: fx.Node) -> bool:
    """True if a node takes computed integers or booleans."""
    kinds = (torch.SymInt, torch.SymBool)
    return any(isinstance(known_value(source), kinds) for source in node.all_input_nodes)


def perhaps_written(node: fx.Node) -> Sequence[fx.Node]:
    """Returns what a node writes; all of its inputs if it may write secretly, as batch norm
    does."""
    if node.op != "call_function" or node.target is operator.getitem:
        return ()
    if isinstance(node.target, _compat.OpOverload) and _compat.schema_of(node.target).is_mutable:
        return written(node)
    as_it_is = written_as_it_is(node.target) and node.target not in statistics.KERNELS
    return () if as_it_is else node.all_input_nodes
