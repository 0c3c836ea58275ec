"""The random number generators that a graph draws from, put back where a step has not happened."""

from __future__ import annotations

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import draws
from graphopt.tracing.rng import generator_of


class DrawnGenerators:
    """The generators that the nodes of a graph draw from.

    Args:
        graph: None: there are none.
    """

    def __init__(self, graph: fx.Graph | None) -> None:
        nodes = [] if graph is None else [node for node in graph.nodes if draws(node)]
        found = {g: None for node in nodes for g in _given(node)}
        if nodes:
            found[torch.random.default_generator] = None
        values = (_compat.tree_leaves(known_value(node)) for node in nodes)
        for value in (leaf for leaves in values for leaf in leaves):
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                found[generator_of(value.device)] = None
        self._generators = list(found)

    def joined(self, others: DrawnGenerators) -> DrawnGenerators:
        """These and others."""
        found = DrawnGenerators(None)
        found._generators = list(dict.fromkeys([*self._generators, *others._generators]))
        return found

    def states(self) -> list[torch.Tensor]:
        """What they are now."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: list[torch.Tensor]) -> None:
        """Put them back."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _given(node: fx.Node) -> list[torch.Generator]:
    leaves = _compat.tree_leaves((list(node.args), dict(node.kwargs)))
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    for leaf in leaves:
        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":
            value = getattr(leaf.graph.owning_module, str(leaf.target), None)
            found += [value] if isinstance(value, torch.Generator) else []
    return found
