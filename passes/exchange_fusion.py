"""Fuses the collectives that scatter sharded gradients into buckets.

Before:                                        After:

    x   = mul(view(g, [8]), 0.5)                   cat  = cat([view(g, [2, 4]), view(h, [2, 2])], 1)
    e   = all_to_all_single(x, [4, 4], [4, 4])     z    = mul(view(cat, [12]), 0.5)
    y   = mul(view(h, [4]), 0.5)                   e    = all_to_all_single(z, [6, 6], [6, 6])
    e_1 = all_to_all_single(y, [2, 2], [2, 2])     w    = wait_tensor(e)
    w   = wait_tensor(e)                           s    = sum_of_ranks(w, 2)
    s   = sum_of_ranks(w, 2)                       rows = split_with_sizes(s, [4, 2])
    w_1 = wait_tensor(e_1)                         …    = rows[0]
    s_1 = sum_of_ranks(w_1, 2)                     …    = rows[1]

`graphopt.ZeRO` writes such exchanges on CPUs. What is meant for one rank stands together, behind
it what is meant for the next one: so a bucket is an exchange as well, with one sum for all members.
Sizes of buckets and their order are those of `comm_fusion_with_concat`, and members begin at
multiples of 64 bytes likewise. What GPUs scatter with `reduce_scatter_tensor` goes into lists that
nothing is copied into (`graphopt.schedule.bucketing`). Buckets that are chosen by cost may be
larger than `bucket_size_mb` there.

Bitwise, on any number of ranks, for exchanges: each element is summed in the order of the ranks,
whatever is sent beside it. NCCL may add in another order on three ranks or more, as it may for each
size of a bucket.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphopt.comm import CommBlock, argument
from graphopt.comm.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketPlanner,
    communicating,
    fusable_blocks,
    pinned_nodes,
)
from graphopt.comm.fusing import copy_sent_names, first_reader, flat_members
from graphopt.graph_utils import is_operator, move_after
from graphopt.graph_utils.cleaning import replace_all
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import fake_value
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.schedule.bucket_sizes import bucket_limits
from graphopt.schedule.bucketing import SCATTER, bucket_kind, join_launches

aten = torch.ops.aten


@graph_optimization_pass(apply_after=["comm_fusion_with_concat"])
def fuse_exchanges(
    gm: fx.GraphModule, bucket_size_mb: float = 25, min_buckets: int | None = 1
) -> int:
    """Fuse the exchanges and reduce-scatters in which sharded gradients are scattered.

    Args:
        bucket_size_mb: the megabytes of gradients after which a bucket closes; the first one closes
            at 1 MB.
        min_buckets: buckets close early enough that there are about so many, but not below
            256 KB; None: as many as cost least, by tables (`graphopt.schedule.granularity`).

    Returns:
        How many exchanges and reduce-scatters changed.
    """
    try:
        return _fuse_exchanges(gm, bucket_size_mb, min_buckets) + _fuse_scatters(
            gm, math.inf if min_buckets is None else bucket_size_mb, min_buckets
        )
    except ValueError as error:
        raise PassArgumentError(str(error)) from None


def _fuse_scatters(gm: fx.GraphModule, bucket_size_mb: float, min_buckets: int | None) -> int:
    """Makes coalesced reduce-scatters, into which nothing is copied."""
    found = fusable_blocks(gm, SCATTER)
    fusable = {launch: block for launch, block in found.items() if bucket_kind(launch) is not None}
    limits = bucket_limits(gm.graph, fusable, bucket_size_mb, min_buckets)
    if len(fusable) < 2:
        return 0
    effects, changed = Effects(gm.graph), 0
    for bucket in BucketPlanner(fusable, effects, pinned_nodes(gm.graph), limits).plan(gm.graph):
        changed += len(bucket.blocks)
        launches = [block.comm_node for block in bucket.blocks]
        overtaken = [node for node in bucket.behind if node < launches[-1]]
        for launch in launches[:-1]:
            launches[-1].prepend(launch)
        joined = join_launches(gm.graph, launches)
        move_after(overtaken, max(joined.users))
    return changed


def _fuse_exchanges(gm: fx.GraphModule, bucket_size_mb: float, min_buckets: int | None) -> int:
    """Makes one exchange of several, into which their members are copied."""
    found = fusable_blocks(gm, "all_to_all_single")
    fusable = {launch: block for launch, block in found.items() if _is_scatter(block)}
    limits = bucket_limits(gm.graph, fusable, bucket_size_mb, min_buckets)
    if len(fusable) < 2:
        return 0
    effects, changed = Effects(gm.graph), 0
    received: dict[fx.Node, fx.Node] = {}
    for bucket in BucketPlanner(fusable, effects, pinned_nodes(gm.graph), limits).plan(gm.graph):
        changed += len(bucket.blocks)
        received |= _fuse(gm.graph, bucket)
    replace_all(received)
    for total in received:
        wait = total.all_input_nodes[0]
        launch = wait.all_input_nodes[0]
        for node in (total, wait, launch):
            gm.graph.erase_node(node)
    return changed


def _is_scatter(block: CommBlock) -> bool:
    """True for an exchange of equal parts whose received parts are then summed."""
    given, received = (
        argument(block.comm_node, name) for name in ("input_split_sizes", "output_split_sizes")
    )
    if not given or list(given) != list(received) or len(set(given)) != 1:
        return False
    users = list(block.wait_nodes[0].users)
    return len(users) == 1 and is_operator(users[0].target, "graphopt_shards::sum_of_ranks")


def _fuse(graph: fx.Graph, bucket: Bucket) -> dict[fx.Node, fx.Node]:
    """Inserts one exchange for a bucket; returns the replacement of each sum."""
    blocks = bucket.blocks
    last = blocks[-1].comm_node
    waits = [block.wait_nodes[0] for block in blocks]
    sums = [next(iter(wait.users)) for wait in waits]
    overtaken = [node for node in bucket.behind if node < last]
    with graph.inserting_before(last):
        launch, sizes = _launch(graph, blocks)
    with graph.inserting_before(first_reader(last, min(waits), set(overtaken))):
        results = _receive(graph, launch, sums, sizes)
    copy_sent_names(blocks, launch)
    old = {*waits, *sums}
    move_after([node for node in overtaken if node not in old], results[-1])
    return dict(zip(sums, results, strict=True))


def _launch(graph: fx.Graph, blocks: Sequence[CommBlock]) -> tuple[fx.Node, list[int]]:
    """Launches one exchange of all members in one tensor: first all parts for rank 0, then for rank
    1, and so on.

    Returns:
        The launch, and the sizes of the parts of what each rank gets: members, and zeros behind
        those that end at no multiple of 64 bytes.
    """
    like = blocks[-1].comm_node
    ranks = len(argument(like, "input_split_sizes"))
    members, factor = flat_members(graph, blocks)
    alignment = ALIGNMENT_BYTES // blocks[-1].dtype.itemsize
    parts: list[fx.Node] = []
    sizes: list[int] = []
    for member in members:
        size = fake_value(member).numel() // ranks
        parts.append(communicating(graph, aten.view.default, (member, [ranks, size]), like))
        gap = -size % alignment
        sizes += [size, gap]
        if gap:
            zeros = communicating(graph, aten.new_zeros.default, (member, [ranks, gap]), like)
            parts.append(zeros)
    sent = communicating(graph, aten.cat.default, (parts, 1), like)
    sent = communicating(graph, aten.view.default, (sent, [-1]), like)
    if factor is not None:
        sent = communicating(graph, aten.mul.Tensor, (sent, factor), like)
    splits = [sum(sizes)] * ranks
    args = (sent, splits, splits, argument(like, "group_name"))
    return communicating(graph, like.target, args, like), sizes


def _receive(
    graph: fx.Graph, launch: fx.Node, sums: Sequence[fx.Node], sizes: Sequence[int]
) -> list[fx.Node]:
    """Waits for a bucket, sums the parts of all ranks, and cuts the result into those of `sums`."""
    like = sums[-1]
    wait = communicating(graph, like.all_input_nodes[0].target, (launch,), like)
    total = communicating(graph, like.target, (wait, *like.args[1:]), like)
    split = communicating(graph, aten.split_with_sizes.default, (total, list(sizes)), like)
    return [
        communicating(graph, operator.getitem, (split, 2 * index), old)
        for index, old in enumerate(sums)
    ]
