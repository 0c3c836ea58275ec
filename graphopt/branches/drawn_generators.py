"""Restoration of random number generators after a graph whose call did not happen."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.generators import generators_used
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import draws


class DrawnGenerators:
    """The generators that the nodes of a graph draw from.

    Args:
        graph: None: there are none.
    """

    def __init__(self, graph: fx.Graph | None) -> None:
        nodes = [] if graph is None else [node for node in graph.nodes if draws(node)]
        given = (generators_used([_given(node), known_value(node)]) for node in nodes)
        found = dict.fromkeys(generator for each in given for generator in each)
        self._generators = list(found)

    def joined(self, others: DrawnGenerators) -> DrawnGenerators:
        """The union of these generators and others."""
        found = DrawnGenerators(None)
        found._generators = list(dict.fromkeys([*self._generators, *others._generators]))
        return found

    def states(self) -> list[torch.Tensor]:
        """The current states of the generators."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _given(node: fx.Node) -> list[Any]:
    """The arguments of a node that are not nodes."""
    leaves = _compat.tree_leaves((list(node.args), dict(node.kwargs)))
    return [_constant(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


def _constant(node: fx.Node) -> Any:
    if node.op != "get_attr":
        return None
    return getattr(node.graph.owning_module, str(node.target), None)
