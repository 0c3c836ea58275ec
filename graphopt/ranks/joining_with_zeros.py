"""A rank that leaves a step joins the other ranks' collectives with zeros, until they learn of it.

They come so to the place where they learn that one of them does not go on:

    rank 0   launch a   launch b                   waits for all to go on ── raises
    rank 1   launch a   ✗ no graph for its branch  launch b of zeros, says that it does not go on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.host.decisions.assumptions import assumptions
from graphopt.host.votes import decides_alone
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument


def launches_before_decisions(graph: fx.Graph, apart: frozenset[str]) -> bool:
    """True if a collective is launched before a decision by a value of one rank alone, or one of
    the process groups `apart` before any decision."""
    decided = assumptions(graph)
    own = [node for node in decided if decides_alone(node.target)]
    return any(
        any(launch < node for node in (decided if str(launch.args[-1]) in apart else own)[-1:])
        for launch in find_nodes(graph, is_collective)
    )


def join_with_zeros(
    executable: fx.Graph, groups: Collection[str], sent: Mapping[str, Sequence[Any]]
) -> None:
    """Launches the graph's remaining collectives on zeros, and waits for them.

    Args:
        groups: the process groups of ranks that run the step together.
        sent: the collectives launched in each group, by its name.
    """
    launched = Counter({name: len(known) for name, known in sent.items()})
    pending = []
    for node in find_nodes(executable, is_collective):
        name = str(argument(node, "group_name"))
        if launched[name]:
            launched[name] -= 1
        elif name in groups:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _zeros)
            target: Any = node.target
            pending.append(target(*args, **kwargs))
    for result in _compat.tree_leaves(pending):
        torch.ops._c10d_functional.wait_tensor(result)


def _zeros(node: fx.Node) -> Any:
    def made(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    return _compat.tree_map(made, known_value(node))
