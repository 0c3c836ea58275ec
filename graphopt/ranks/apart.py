"""Ranks that begin a call once more while others go on with theirs.

Where an assumption of a graph fails, the ranks that average gradients leave it together, and run
the call as the graph of another branch. Ranks of other groups of the step's own (layers of which
each rank has a part, communication by hand) know nothing of it and go on: what they have joined is
not launched again. The other graph takes what it has given (`graphopt.runtime.sent_before`).

So all graphs of such a step launch in the order of the program, as no pass has moved it: each rank
may run the graph of another branch.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.host.assumptions import assumptions
from graphopt.parallel import OverRanks, Parallel


def ranks_together(parallel: Parallel) -> frozenset[int]:
    """The ranks that run a step alike."""
    if isinstance(parallel, OverRanks):
        return frozenset(dist.get_process_group_ranks(_compat.group_or_default(parallel.group)))
    return frozenset({dist.get_rank()})


def groups_apart(graph: fx.Graph, parallel: Parallel) -> frozenset[str]:
    """Names of the groups whose other ranks go on where the ranks that run a step alike begin it
    once more; none where the graph assumes nothing."""
    if not assumptions(graph):
        return frozenset()
    launches = find_nodes(graph, is_collective)
    names = {str(node.args[-1]) for node in launches}
    together = ranks_together(parallel) if names else frozenset()
    return frozenset(
        name for name in names if not together.issuperset(_compat.ranks_of_group(name) or ())
    )


def launched_apart(graph: fx.Graph, groups: frozenset[str]) -> bool:
    """Whether something is launched in one of these groups before the last assumption."""
    if not groups:
        return False
    last = assumptions(graph)[-1]
    launches = find_nodes(graph, is_collective)
    return any(str(node.args[-1]) in groups and node < last for node in launches)
