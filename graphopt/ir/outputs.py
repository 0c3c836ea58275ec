"""Outputs of a graph by the output convention of docs/ir.md."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import fx

from graphopt import _compat
from graphopt.ir.operators import is_copy


def get_output(graph: fx.Graph) -> fx.Node:
    """Returns the output node of a graph.

    >>> graphopt.graph_utils.get_output(gm.graph).op
    'output'
    """
    node: fx.Node = next(iter(reversed(graph.nodes)))
    assert node.op == "output"
    return node


class Outputs(NamedTuple):
    """The three parts of a captured graph's output, as lists of nodes and constants.

    >>> from graphopt.graph_utils import Outputs, get_outputs
    >>> isinstance(get_outputs(gm.graph), Outputs)
    True
    """

    results: list[Any]
    updates: list[fx.Node]
    carried: list[Any]


def get_outputs(graph: fx.Graph) -> Outputs:
    """Returns the outputs of a graph in the output convention of docs/ir.md.

    Of a graph that has another output, every `copy_` returned is a state update, and every other
    leaf a result.

    >>> outputs = graphopt.graph_utils.get_outputs(gm.graph)
    >>> outputs.results, len(outputs.updates)
    ([sum_1], 2)
    """
    returned = get_output(graph).args[0]
    if follows_output_convention(graph):
        results, updates, carried = cast(Any, returned)
        return Outputs(list(results), list(updates), list(carried))
    leaves = _compat.tree_leaves(returned)
    updates = [leaf for leaf in leaves if _is_copy(leaf)]
    return Outputs([leaf for leaf in leaves if not _is_copy(leaf)], updates, [])


def follows_output_convention(graph: fx.Graph) -> bool:
    """True if a graph returns ``(user results, state updates, carried values)``, each a list.

    >>> from graphopt.graph_utils import follows_output_convention
    >>> follows_output_convention(gm.graph)
    True
    """
    returned = get_output(graph).args[0]
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        return False
    return all(isinstance(part, (tuple, list)) for part in returned)


def _is_copy(value: object) -> bool:
    return isinstance(value, fx.Node) and is_copy(value)


def set_outputs(graph: fx.Graph, outputs: Outputs) -> None:
    """Sets the outputs of a graph.

    >>> from graphopt.graph_utils import get_outputs, set_outputs
    >>> outputs = get_outputs(gm.graph)
    >>> set_outputs(gm.graph, outputs._replace(results=[]))
    >>> get_outputs(gm.graph).results
    []
    """
    get_output(graph).args = (tuple(outputs),)
