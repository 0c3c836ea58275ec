"""Gather updated parameters early, many in one collective, and wait for them late.

    s  = wait(scattered g)                    s   = wait(scattered g)
    r  = update(window(w), s)                 r   = update(window(w), s)
    g1 = all_gather(r)                        …     the same of v, q
    w' = copy_(w, view(wait(g1)))      ==>    g   = all_gather_coalesced([r, q])
    t  = wait(scattered h)                    …     what is left of the backward
    …                                         w'  = copy_(w, view(wait(g[0])))
    v' = copy_(v, view(wait(g2)))             v'  = copy_(v, view(wait(g[1])))

For `graphopt.ZeRO(stage=1)`, whose parameters are updated in rows. Gathers whose updates need one
bucket of gradients become one collective, in a list that nothing is copied into. It is launched in
the backward where what it needs has arrived by then, and else behind the backward, in the order in
which the next forward reads parameters: `graphopt.schedule.gathers` says when. What follows from a
gather stands at the end of the step, where `iter_move_grads_and_optimizers` can leave it to the
next iteration. Nodes are only reordered and collectives put together: bitwise.
"""

from __future__ import annotations

from torch import fx

from graphopt.comm import get_all_comm_blocks
from graphopt.errors import ScheduleError
from graphopt.ir.metadata import is_launch_kept
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.optim import split_updates
from graphopt.schedule import apply_schedule
from graphopt.schedule.constraints import predecessors
from graphopt.schedule.gathers import GatherOrder, gathers_of_parameters, grouped

_REDUCTIONS = ("all_to_all_single", "reduce_scatter_tensor", "all_reduce")


@graph_optimization_pass(
    prerequisites=["remove_copy_from_optimizer"],
    apply_after=["comm_fusion_with_concat", "fuse_exchanges", "schedule_comm_wait"],
)
def schedule_gathers(gm: fx.GraphModule) -> int:
    """Gather updated parameters early, many in one collective.

    Returns:
        How many nodes had to move, and collectives became fewer.
    """
    gathers = gathers_of_parameters(gm.graph)
    if not gathers or any(map(is_launch_kept, gathers)):
        return 0
    found = get_all_comm_blocks(gm, _REDUCTIONS)
    blocks = [block for block in found if not _leads_nowhere(block.outputs)]
    updates = split_updates(gm, [block.outputs for block in blocks])
    groups = grouped(gathers_of_parameters(gm.graph), blocks, updates)
    before = predecessors(gm.graph)
    schedule = GatherOrder(gm.graph, before, groups).schedule()
    try:
        schedule.check(before)
    except ScheduleError as error:
        raise PassArgumentError(str(error)) from error
    return apply_schedule(gm.graph, schedule)


def _leads_nowhere(outputs: list[fx.Node]) -> bool:
    return not any(node.users for node in outputs)
