"""Collectives in groups of which other ranks may run another graph of the same step.

The ranks that average gradients compare what their graphs launch. Ranks of other groups of the
step's own (layers of which each rank has a part, communication by hand) compare nothing: one may
take part in fewer groups, keep an average of the weights, or decide by values. What is launched in
such a group stays as the program launches it, unless the pipeline is the user's own, who knows.

Where an assumption of a graph fails, the ranks that average gradients leave it together, and run
the call as the graph of another branch. Others know nothing of it and go on: what they have joined
is not launched again. The other graph takes what it has given (`branches.sent_collectives`). So no
pass moves anything in graphs that assume something and launch in such a group.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.ir.metadata import keep_launch
from graphopt.parallel import OverRanks, Parallel


def ranks_together(parallel: Parallel) -> frozenset[int]:
    """The group of ranks that run the same graph of a step."""
    if isinstance(parallel, OverRanks):
        return frozenset(dist.get_process_group_ranks(parallel.everyone))
    return frozenset({dist.get_rank()})


def groups_apart(graph: fx.Graph, parallel: Parallel) -> frozenset[str]:
    """The names of a graph's groups that include ranks which may run another graph."""
    launches = find_nodes(graph, is_collective)
    names = {str(node.args[-1]) for node in launches}
    together = ranks_together(parallel) if names else frozenset()
    return frozenset(
        name for name in names if not together.issuperset(_compat.ranks_of_group(name) or ())
    )


def keep_launches(graph: fx.Graph, groups: frozenset[str]) -> None:
    """Keeps the launch order of these groups' collectives as the program has it."""
    for node in find_nodes(graph, is_collective):
        if str(node.args[-1]) in groups:
            keep_launch(node)
