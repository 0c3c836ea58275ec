"""Restoration of random number generators after a graph whose call did not happen."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.generators import generators_used
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import draws
from graphopt.verify.checks.module_constants import attribute


class DrawnStates:
    """The states of random number generators when this is made.

    Attributes:
        generators: all of them, each once.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self.generators = list(dict.fromkeys(generators))
        self._states = [generator.get_state() for generator in self.generators]

    def restore(self) -> None:
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)


def drawn_generators(graph: fx.Graph) -> list[torch.Generator]:
    """Returns the generators that the nodes of a graph draw from."""
    used = (generators_used(_values(node)) for node in graph.nodes if draws(node))
    return list(dict.fromkeys(generator for each in used for generator in each))


def _values(node: fx.Node) -> list[object]:
    """The value of a node, and its arguments that are known."""
    leaves = _compat.tree_leaves((list(node.args), dict(node.kwargs)))
    constants = [n for n in node.all_input_nodes if n.op == "get_attr"]
    return [known_value(node), leaves, [attribute(n.graph.owning_module, n) for n in constants]]
