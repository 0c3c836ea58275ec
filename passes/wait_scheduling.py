"""Wait for communication as late as possible.

Before:                                   After:

    all_reduce  = all_reduce(grad)            all_reduce  = all_reduce(grad)
    wait_tensor = wait_tensor(all_reduce)     mm          = mm(a, b)
    view        = view(wait_tensor, [4])      wait_tensor = wait_tensor(all_reduce)
    mm          = mm(a, b)                    view        = view(wait_tensor, [4])
    add         = add(param, view)            add         = add(param, view)

Each wait moves, with the views after it, to just before the first node that reads what was
received: everything in between overlaps with the communication. Nodes are only reordered, so
numerics do not change. Fused or not: where `comm_fusion_with_concat` is applied, it comes first.

Waits with one first reader, such as an optimizer that updates a list, stand before it in launch
order. A result that nobody reads is waited for at the end of a captured step: the gradient of a
parameter that no optimizer has is averaged all the same. In any other graph it is an error.
"""

from __future__ import annotations

from torch import fx

from graphopt.comm import CommBlock, get_all_comm_blocks, late_nodes, located
from graphopt.errors import VerificationError
from graphopt.graph_utils import get_output, move_before
from graphopt.ir.metadata import provenance_of
from graphopt.ir.views import view_tail
from graphopt.manager import graph_optimization_pass
from graphopt.manager.notes import note


@graph_optimization_pass(apply_after=["comm_fusion_with_concat"])
def schedule_comm_wait(gm: fx.GraphModule) -> int:
    """Delay each wait to just before its first real user. Returns how many waits moved."""
    late = late_nodes(gm)
    tails: dict[fx.Node, list[list[fx.Node]]] = {}
    for block in get_all_comm_blocks(gm):
        if not late.keys().isdisjoint(block.node_list):
            continue
        for wait in block.wait_nodes:
            tail = sorted(view_tail(wait))
            tails.setdefault(_first_user(block, tail), []).append(tail)
    moved = sum(_place(waits, user) for user, waits in tails.items())
    if not tails:
        note("the graph has no collective that is waited for in its own iteration")
    elif not moved:
        note("each wait stands just before the first node that reads what was received")
    return moved


def _first_user(block: CommBlock, tail: list[fx.Node]) -> fx.Node:
    inside = set(tail)
    users = [user for node in tail for user in node.users if user not in inside]
    if users:
        return min(users)
    if "capture" in provenance_of(block.comm_node):
        return get_output(block.comm_node.graph)
    raise VerificationError(
        f"nobody reads the result of collective %{block.comm_node.name}\n"
        f"{located(block.comm_node)}\n"
        "  hint:  let a node read its wait, or take it out of the graph on every rank"
    )


def _place(tails: list[list[fx.Node]], user: fx.Node) -> int:
    """Moves `tails` right before `user`; returns how many were elsewhere."""
    before = user
    for settled, tail in enumerate(reversed(tails)):
        for node in reversed(tail):
            if before.prev is not node:
                move_before([member for tail in tails for member in tail], user)
                return len(tails) - settled
            before = node
    return 0
