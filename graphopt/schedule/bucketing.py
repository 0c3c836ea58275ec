"""Fusion of all-gathers and reduce-scatters of the same kind into one collective.

Before:                                      After:

    g1 = all_gather(a, 2, "0")                   g  = all_gather_coalesced([a, b], 2, "0")
    g2 = all_gather(b, 2, "0")                   i  = g[0]
    w1 = wait_tensor(g1)                         i1 = g[1]
    w2 = wait_tensor(g2)                         w1 = wait_tensor(i)
                                                 w2 = wait_tensor(i1)

One call sends a list of tensors. Nothing is copied into a bucket or out of one, sizes may be
uneven, and gloo reduces tensor by tensor: the bits are the same on any number of ranks. (NCCL may
choose another algorithm for a group of calls than for one; with more than two ranks the proof says
that sums may be in another order.) A bucket in one flat tensor would have to lie by ranks: to
receive a gather, or to send what is scattered, takes a copy of all its bytes then.

All-reduces are put together by the pass `comm_fusion_with_concat`, which flattens them: backends
do so with a list of these as well.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

import torch
from torch import fx

from graphopt import _compat
from graphopt.comm import argument, kind_of, located
from graphopt.errors import ScheduleError
from graphopt.graph_utils import call_function_with_meta, is_collective, is_wait
from graphopt.ir.metadata import known_value, sent_names, set_sent_names

_c10d = torch.ops._c10d_functional

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"

_OF_SEVERAL = {
    GATHER: (_c10d.all_gather_into_tensor_coalesced.default, ("group_size", "group_name")),
    SCATTER: (
        _c10d.reduce_scatter_tensor_coalesced.default,
        ("reduce_op", "group_size", "group_name"),
    ),
}
"""The operator for several tensors, and its further arguments, for each operator for one."""

BucketKind = tuple[Hashable, ...]


def bucket_kind(launch: fx.Node) -> BucketKind | None:
    """Returns the properties that all launches of a bucket share: operator, reduction, group, dtype
    and device. None if a launch cannot be bucketed.

    Such are all collectives but gathers and reduce-scatters, and those whose size is dynamic, that
    send no element, or whose result is not read through one wait alone.
    """
    if not is_collective(launch) or kind_of(launch) not in _OF_SEVERAL:
        return None
    users = list(launch.users)
    sent = known_value(launch.all_input_nodes[0])
    if len(users) != 1 or not is_wait(users[0]) or not isinstance(sent, torch.Tensor):
        return None
    if _compat.has_symbolic_shape(sent) or not sent.numel() or not sent.is_contiguous():
        return None
    kind = kind_of(launch)
    options = (argument(launch, name) for name in _OF_SEVERAL[kind][1])
    return kind, *options, sent.dtype, sent.device


def check_bucket(bucket: Sequence[fx.Node]) -> None:
    """Raises if launches cannot become one collective.

    Raises:
        ScheduleError: fewer than two, of several kinds, or of a kind that is in no bucket.
    """
    if len(bucket) < 2:
        raise ScheduleError("a bucket has at least two members")
    first = bucket_kind(bucket[0])
    for launch in bucket:
        kind = bucket_kind(launch)
        if kind is None or kind != first:
            raise ScheduleError(
                f"%{launch.name} cannot go into one collective with %{bucket[0].name}: members are"
                " all-gathers or reduce-scatters of one reduction, group, dtype and device, of"
                f" known size, each with one wait\n{located(launch)}"
            )


def join_launches(graph: fx.Graph, bucket: Sequence[fx.Node]) -> fx.Node:
    """Fuses adjacent launches into one collective and returns it.

    Each wait stays where it is, and waits for an item of what the new one gives. What is read of
    a wait has the shape, dtype and strides that it had.
    """
    last = bucket[-1]
    target, names = _OF_SEVERAL[kind_of(last)]
    sent = [launch.all_input_nodes[0] for launch in bucket]
    options = (argument(last, name) for name in names)
    with graph.inserting_before(last.next):
        joined = call_function_with_meta(graph, target, (sent, *options), like=last)
        items = [
            call_function_with_meta(graph, operator.getitem, (joined, index), like=launch)
            for index, launch in enumerate(bucket)
        ]
    names_sent = [name for launch in bucket for name in sent_names(launch)]
    if names_sent:
        set_sent_names(joined, names_sent)
    for launch, item in zip(bucket, items, strict=True):
        set_sent_names(item, ())
        launch.replace_all_uses_with(item)
        graph.erase_node(launch)
    return joined
