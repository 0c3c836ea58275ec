"""Hides communication: launches early, waits late, and lets compute fill the time between.

    x   = relu(x0)                             g1  = all_gather(w1)
    g1  = all_gather(w1)                       x   = relu(x0)
    w   = wait(g1)                     ==>     g2  = all_gather(w2)
    y   = mm(x, w)                             w   = wait(g1)
    g2  = all_gather(w2)                       y   = mm(x, w)
    w_1 = wait(g2)                             w_1 = wait(g2)
    z   = mm(y, w_1)                           z   = mm(y, w_1)

For steps that gather parameters and scatter gradients, or reduce activations, over any number of
groups. All nodes may move, within what they need and the order of updates, random numbers and
functions on the host. What is decided, and how, is in `graphopt.schedule.overlap`; the order that
comes out is simulated, and kept only if it is faster and holds no more memory.

All-gathers become one where starting them takes long, and so do reduce-scatters:

    g1  = all_gather(w1)                       g   = all_gather_coalesced([w1, w2])
    w   = wait(g1)                             i   = g[0]; i_1 = g[1]
    y   = mm(x, w)                   ==>       w   = wait(i)
    g2  = all_gather(w2)                       w_1 = wait(i_1)
    w_1 = wait(g2)                             y   = mm(x, w)
    z   = mm(y, w_1)                           z   = mm(y, w_1)

of one group, reduction, dtype and device, in a list that nothing is copied into
(`graphopt.schedule.bucketing`). Several sizes of buckets are tried (`graphopt.schedule.buckets`),
and kept only if the simulation is faster still, in as little memory. Where gloo communicates, as in
the presets for CPUs, only gathers gain: it sends a list of scatters one by one.

Costs are presets, the same on every rank and every machine, or those of a file written by
`graphopt.cost.CostModel.save`, which all ranks have to read alike.

Every rank decides for itself from its own graph: ranks with other shapes, whose costs differ, may
launch in another order, which deadlocks. `graphopt.verify.check_spmd` tells.

Bitwise, with one exception: where several scatters become one call, NCCL may add in another order
on three ranks or more. gloo does not, and `buckets=False` leaves them alone.

Not part of the default pipeline: gradients of data parallelism are scheduled by the passes for
buckets.
"""

from __future__ import annotations

from torch import fx

from graphopt.cost import CostModel, CostTableError, costs_in, default_cost_model
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.schedule import ScheduleError, apply_schedule, overlap_schedule


@graph_optimization_pass()
def schedule_overlap(
    gm: fx.GraphModule,
    device: str | None = None,
    network: str | None = None,
    costs: str | None = None,
    max_mb: float | None = None,
    buckets: bool = True,
) -> int:
    """Launch early and wait late, as far as memory allows.

    Args:
        device: a name in `graphopt.cost.DEVICES`; None: by where the tensors are.
        network: a name in `graphopt.cost.NETWORKS`; None: by device and number of ranks.
        costs: file of costs in place of both; those of another machine are taken with a warning.
        max_mb: of values that may be held at once, inputs left out, in MiB; None: what the graph
            holds as it is.
        buckets: whether all-gathers and reduce-scatters may become fewer.

    Returns:
        How many nodes had to move, and collectives became fewer.

    Raises:
        PassArgumentError: no such device or network, late nodes stand in the graph already, or no
            order was found that holds no more than `max_mb`.
        FileError: `costs` cannot be read.
    """
    try:
        model = _cost_model(gm.graph, device, network, costs)
        most = None if max_mb is None else round(max_mb * 2**20)
        schedule = overlap_schedule(gm.graph, model, max_bytes=most, buckets=buckets)
    except (CostTableError, ScheduleError) as error:
        raise PassArgumentError(str(error)) from error
    return 0 if schedule is None else apply_schedule(gm.graph, schedule)


def _cost_model(
    graph: fx.Graph, device: str | None, network: str | None, costs: str | None
) -> CostModel:
    if costs is not None:
        return costs_in(costs, graph)
    preset = default_cost_model(graph)
    if device is None and network is None:
        return preset
    chosen = CostModel.preset(device or "cpu", network or "ethernet")
    return CostModel(
        preset.compute if device is None else chosen.compute,
        preset.communication if network is None else chosen.communication,
    )
