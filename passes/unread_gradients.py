"""Removes the averages of gradients that nobody reads.

Before:                                            After:

    g       = mm(dy, x)                                ...
    launch  = all_reduce(g * 0.5, "sum")
    wait    = wait_tensor(launch)     nobody reads it

A parameter that no optimizer has, and whose gradient is set to None in the step, has a gradient
that is averaged for nobody. All ranks run the same graph, so all leave it out. Numerics do not
change; less is communicated, which `changes_communication` declares.

Collectives that the step calls itself stay, and so do those that other ranks may join from another
graph.
"""

from __future__ import annotations

from torch import fx

from graphopt.comm import get_all_comm_blocks, late_nodes, parameters_of
from graphopt.graph_utils import is_needed
from graphopt.ir.metadata import is_launch_kept
from graphopt.manager import graph_optimization_pass


@graph_optimization_pass(whole_step=True, changes_communication=True)
def drop_unread_gradients(gm: fx.GraphModule) -> int:
    """Remove averages of gradients that nobody reads. Returns how many."""
    late, dropped = late_nodes(gm.graph), 0
    for block in get_all_comm_blocks(gm, "all_reduce"):
        launch, kept = block.comm_node, is_launch_kept(block.comm_node)
        if kept or not parameters_of(gm, block) or launch in late or _is_read(block.wait_nodes):
            continue
        for wait in block.wait_nodes:
            _erase(gm.graph, wait)
        gm.graph.erase_node(launch)
        dropped += 1
    return dropped


def _is_read(nodes: list[fx.Node]) -> bool:
    """True if a result or side effect of the step depends on the nodes."""
    pending, seen = list(nodes), set(nodes)
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or is_needed(user):
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Removes a node and all nodes that read it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)
