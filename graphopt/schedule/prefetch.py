"""Prefetch of sharded parameters: gathers launched some buckets ahead of their use.

    gather 1  gather 2  gather 3 | wait 1, compute 1 | gather 4 | wait 2, compute 2 | gather 5 | …

Gathers go into buckets in the order of their first use, for the forward and then for the backward.
Each bucket is launched where the one `AHEAD` places before it is waited for. So the link has always
something to send while there is something to compute, and no rank holds more than `AHEAD + 1`
buckets of parameters whole. A bucket is at most as large as those in which gradients are scattered:
a share that does not depend on the speed of the link (`graphopt.schedule.granularity`).

Parameters that are read behind their update are gathered in buckets of their own, and not before
the gradients have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.graph_utils import is_collective, is_wait
from graphopt.ir.metadata import fake_value, phase_of
from graphopt.ir.views import view_tail
from graphopt.schedule.bucketing import bucket_kind
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.emitting import Emitter
from graphopt.schedule.gathers import is_gather
from graphopt.schedule.order import Schedule

AHEAD = 2
"""The number of buckets gathered ahead of their first use."""

_PHASES = ("forward", "backward")


@dataclass(eq=False)
class Use:
    """A gather and the computation that reads it.

    Attributes:
        launch: its node.
        tail: its wait, what puts windows of uneven rows together, and views of that.
        reader: the first node that computes with it.
        nbytes: of the whole.
    """

    launch: fx.Node
    tail: list[fx.Node]
    reader: fx.Node
    nbytes: int


def uses_of_gathers(graph: fx.Graph) -> list[Use]:
    """Returns the gathers that forward and backward read, by first use."""
    found = []
    for node in filter(is_gather, graph.nodes):
        (wait,) = node.users
        tail = _put_together(wait)
        readers = {user for member in tail for user in member.users}.difference(tail)
        if is_wait(wait) and readers and phase_of(min(readers)) in _PHASES:
            found.append(Use(node, tail, min(readers), fake_value(node).nbytes))
    return sorted(found, key=lambda use: use.reader)


def _put_together(wait: fx.Node) -> list[fx.Node]:
    """Returns a wait with the nodes that only join its received windows to a whole tensor, where
    rows are uneven."""
    found = set(view_tail(wait))
    pending = list(found)
    while pending:
        for user in pending.pop().users:
            inside = phase_of(user) == "communication" and found.issuperset(user.all_input_nodes)
            if user not in found and inside and not is_collective(user):
                more = {user, *view_tail(user)} - found
                found |= more
                pending += more
    return sorted(found)


def buckets_of(uses: Sequence[Use], limit: float) -> list[list[Use]]:
    """Splits uses into buckets of at most `limit` bytes, each of one kind and phase, and of
    parameters that are all updated or all not."""
    buckets: list[list[Use]] = []
    last: object = None
    for use in uses:
        kind = (bucket_kind(use.launch), phase_of(use.reader), _is_updated(use.launch))
        full = buckets and sum(each.nbytes for each in buckets[-1]) + use.nbytes > limit
        if kind != last or full:
            buckets.append([])
        buckets[-1].append(use)
        last = kind
    return buckets


def _is_updated(launch: fx.Node) -> bool:
    """True if a gather sends something else than an input of the step, or a cast of one."""
    sent = launch.all_input_nodes
    while len(sent) == 1 and sent[0].op != "placeholder":
        sent = sent[0].all_input_nodes
    return len(sent) != 1


def order_of_prefetch(
    graph: fx.Graph, before: Predecessors, buckets: Sequence[Sequence[Use]]
) -> Schedule:
    """Returns an order with each bucket launched ahead of its first use.

    Args:
        before: what each node needs (`graphopt.schedule.constraints`).
    """
    emitter = Emitter(graph.nodes, before)
    waiting = list(buckets)
    starts = {bucket[0].reader: index for index, bucket in enumerate(buckets)}
    held = {use.launch for bucket in buckets for use in bucket}
    held |= {node for bucket in buckets for use in bucket for node in use.tail}
    launched = 0
    for node in graph.nodes:
        if node in held:
            continue
        if node in starts:
            until = min(starts[node] + AHEAD + 1, len(waiting))
            while launched < until:
                bucket = [use.launch for use in waiting[launched]]
                if launched > starts[node] and any(map(is_collective, emitter.needed(bucket))):
                    break
                emitter.launch(bucket)
                launched += 1
        emitter.emit(node)
    return emitter.finished()
