"""Gathers sharded parameters early, in few collectives, and waits for them late.

    s  = wait(scattered g)                    s   = wait(scattered g)
    r  = update(window(w), s)                 r   = update(window(w), s)
    g1 = all_gather(r)                        …     the same of v, q
    w' = copy_(w, view(wait(g1)))      ==>    g   = all_gather_coalesced([r, q])
    t  = wait(scattered h)                    …     what is left of the backward
    …                                         w'  = copy_(w, view(wait(g[0])))
    v' = copy_(v, view(wait(g2)))             v'  = copy_(v, view(wait(g[1])))

For `graphopt.ZeRO`. With stage 1 parameters are updated in rows and then gathered. Gathers whose
updates need one bucket of gradients become one collective, in a list that nothing is copied into.
It is launched in the backward where what it needs has arrived by then, on GPUs if the link would
idle, and else behind the backward, in the order in which the next forward reads parameters
(`graphopt.schedule.gathers`).
What follows from a gather stands at the end of the step, where `iter_move_grads_and_optimizers` can
leave it to the next iteration.

With stage 3 parameters are gathered for the forward and for the backward. Such gathers become few
as well, by the order of their use, and each is launched two buckets ahead of its use
(`graphopt.schedule.prefetch`). On GPUs buckets are twice as large, and a schedule by
costs follows, in no more memory (`graphopt.schedule.overlap`).

Nodes are only reordered and collectives put together: bitwise.
"""

from __future__ import annotations

from torch import fx

from graphopt.comm import get_all_comm_blocks
from graphopt.cost import default_cost_model
from graphopt.errors import ScheduleError
from graphopt.ir.metadata import fake_value, is_launch_kept
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.optim import split_updates
from graphopt.schedule import Schedule, apply_schedule, collectives_by_cost, overlap_schedule
from graphopt.schedule.bucket_sizes import SMALLEST_BUCKET_BYTES
from graphopt.schedule.constraints import Predecessors, predecessors
from graphopt.schedule.early_gathers import place_by_cost
from graphopt.schedule.gathers import (
    gathers_of_parameters,
    grouped,
    order_of_gathers,
    place_by_share,
)
from graphopt.schedule.prefetch import buckets_of, order_of_prefetch, uses_of_gathers

_REDUCTIONS = (
    "all_to_all_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_reduce",
)
_LARGER_ON_GPUS = 2
"""The factor of bucket sizes on GPUs, where a schedule by costs follows."""


@graph_optimization_pass(
    prerequisites=["remove_copy_from_optimizer"],
    apply_after=["comm_fusion_with_concat", "fuse_exchanges", "schedule_comm_wait"],
)
def schedule_gathers(gm: fx.GraphModule) -> int:
    """Gather parameters early, many in one collective.

    Returns:
        How many nodes had to move, and collectives became fewer.
    """
    return _schedule_reads(gm) + _schedule_updates(gm) + _schedule_everything(gm)


def _schedule_everything(gm: fx.GraphModule) -> int:
    """Schedules all collectives on a GPU in no more memory; does nothing where gathers are left
    to the next iteration."""
    uses = uses_of_gathers(gm.graph)
    on_cpu = any(_is_on_cpu(use.launch) for use in uses)
    if not uses or on_cpu or any(is_launch_kept(use.launch) for use in uses):
        return 0
    schedule = overlap_schedule(gm.graph, default_cost_model(gm.graph))
    return 0 if schedule is None else apply_schedule(gm.graph, schedule)


def _schedule_reads(gm: fx.GraphModule) -> int:
    """Schedules the gathers that the forward and the backward read."""
    graph = gm.graph
    uses = uses_of_gathers(graph)
    if not uses or any(is_launch_kept(use.launch) for use in uses):
        return 0
    once = {use.launch.all_input_nodes[0]: use for use in uses}.values()
    launches = [use.launch for use in once]
    count = collectives_by_cost(graph, launches, default_cost_model(graph))
    size = max(sum(use.nbytes for use in once) / count, SMALLEST_BUCKET_BYTES)
    before = predecessors(graph)
    times = 1 if _is_on_cpu(uses[0].launch) else _LARGER_ON_GPUS
    return _applied(graph, order_of_prefetch(graph, before, buckets_of(uses, times * size)), before)


def _schedule_updates(gm: fx.GraphModule) -> int:
    """Schedules the gathers of updated parameters."""
    gathers = gathers_of_parameters(gm.graph)
    if not gathers or any(map(is_launch_kept, gathers)):
        return 0
    found = get_all_comm_blocks(gm, _REDUCTIONS)
    blocks = [block for block in found if any(node.users for node in block.outputs)]
    updates = split_updates(gm, [block.outputs for block in blocks])
    groups = grouped(gathers_of_parameters(gm.graph), blocks, updates)
    if _is_on_cpu(next(iter(gathers))):
        place_by_share(groups, blocks)
    else:
        place_by_cost(gm.graph, groups, blocks, default_cost_model(gm.graph))
    before = predecessors(gm.graph)
    return _applied(gm.graph, order_of_gathers(gm.graph, before, groups), before)


def _is_on_cpu(launch: fx.Node) -> bool:
    return bool(fake_value(launch).device.type == "cpu")


def _applied(graph: fx.Graph, schedule: Schedule, before: Predecessors) -> int:
    try:
        schedule.check(before)
    except ScheduleError as error:
        raise PassArgumentError(str(error)) from error
    return apply_schedule(graph, schedule)
