"""Fuse all-reduces into buckets.

Before:                                      After:

    mul          = mul(grad_b, 0.5)              view     = view(grad_w, [16])
    all_reduce   = all_reduce(mul)               cat      = cat([grad_b, view])
    mul_1        = mul(grad_w, 0.5)              mul      = mul(cat, 0.5)
    all_reduce_1 = all_reduce(mul_1)             all_reduce = all_reduce(mul)
    wait         = wait_tensor(all_reduce)       wait     = wait_tensor(all_reduce)
    wait_1       = wait_tensor(all_reduce_1)     split    = split_with_sizes(wait, [16, 16])
    add          = add(b, wait)                  getitem  = split[0]; getitem_1 = split[1]
    add_1        = add(w, wait_1)                view_1   = view(getitem_1, [4, 4])
                                                 add      = add(b, getitem)
                                                 add_1    = add(w, view_1)

A launch first moves up to the gradient that it sends; launches of one group keep their order, which
all ranks share. In that order all-reduces of one group, operation, dtype and device fill a bucket.
As in DistributedDataParallel, the first bucket of each such kind closes at 1 MB, so that
communication starts early, and later ones at `bucket_size_mb`. A bucket is launched where its last
member was. Nodes that stood before the fused wait and need a member move after it, in order.

What is sent while the backward computes costs no time; what is left when it ends does, and a
large last bucket is most of a small model. With `min_buckets` buckets close earlier, so that there
are about that many, but none below 256 KB, where the time of a collective no longer depends on its
size. With None it is a number by cost (`graphopt.schedule.granularity`): of tables, so that it is
the same on every rank and every machine. The default pipeline does so. A gradient that is much
larger than the others (an embedding) is a bucket by itself, and does not make theirs larger.

A gradient that fills a bucket by itself goes alone: nothing copies it, and a graph in its
executable form reduces it where it is. A bucket of small ones is filled beside those, one for every
four times its size that goes by: so what waits for it is near its members in the model. The large
one that goes by then is copied into it, up to 4 MB: a collective more takes longer than that.

Left as they are: a bucket of one; a late node; a tensor that is empty, not contiguous or of a
dynamic size; a result read through `as_strided`, whose offset counts from the beginning of the
bucket; what other ranks may launch in another graph (`graphopt.ir.metadata.is_launch_kept`). A
collective that needs a member closes the bucket before it, so no dependent pair is ever fused.

Members begin at multiples of 64 bytes, with zeros in between where sizes are odd: matrix-vector
kernels give other bits at other alignments. A result that leaves the graph (a gradient that stays
in `.grad`) is copied out of its bucket, as DistributedDataParallel does. Gradients that are all
scaled by one constant are scaled together.

Numerics: each element is the sum of the same terms. With two ranks the bits are the same; a ring of
more ranks adds them in an order that depends on where in a bucket an element lies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from graphopt.comm import CommBlock
from graphopt.comm.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketPlanner,
    communicating,
    fusable_blocks,
    may_change,
    pinned_nodes,
    raise_launches,
)
from graphopt.comm.fusing import copy_out, copy_sent_names, first_reader, flat_members
from graphopt.comm.unfused import why_unfused
from graphopt.graph_utils import move_after
from graphopt.graph_utils.cleaning import replace_all
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import fake_value
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.manager.notes import note
from graphopt.schedule.bucket_sizes import bucket_limits

aten = torch.ops.aten


@graph_optimization_pass()
def comm_fusion_with_concat(
    gm: fx.GraphModule, bucket_size_mb: float = 25, min_buckets: int | None = 1
) -> int:
    """Fuse all-reduces into buckets (three ranks or more: sums in another order).

    Args:
        bucket_size_mb: the megabytes of gradients after which a bucket closes; the first one closes
            at 1 MB.
        min_buckets: buckets close early enough that there are about so many, but not below
            256 KB; large gradients and collectives in between make them fewer or more. None: as
            many as cost least, by tables (`graphopt.schedule.granularity`).

    Returns:
        How many all-reduces changed.
    """
    try:
        limits = bucket_limits(gm.graph, fusable_blocks(gm), bucket_size_mb, min_buckets)
    except ValueError as error:
        raise PassArgumentError(str(error)) from None
    changed = 0
    while changed_now := _fuse_all(gm, limits):  # each bucket may let more launches move up
        changed += changed_now
    if not changed:
        note(why_unfused(gm, limits))
    return changed


def _fuse_all(gm: fx.GraphModule, limits: tuple[int, int]) -> int:
    fusable = fusable_blocks(gm)
    if not may_change(fusable, gm.graph, limits):
        return 0
    effects = Effects(gm.graph)
    changed = raise_launches(gm.graph, fusable, effects)
    received: dict[fx.Node, fx.Node] = {}
    for bucket in BucketPlanner(fusable, effects, pinned_nodes(gm.graph), limits).plan(gm.graph):
        changed.update(block.comm_node for block in bucket.blocks)
        received |= _fuse(gm.graph, bucket)
    for wait, result in received.items():
        if effects.leaves_the_graph(wait):
            received[wait] = copy_out(gm.graph, result, wait)
    replace_all(received)
    for wait in received:
        launch = wait.all_input_nodes[0]
        gm.graph.erase_node(wait)
        gm.graph.erase_node(launch)
    return len(changed)


def _fuse(graph: fx.Graph, bucket: Bucket) -> dict[fx.Node, fx.Node]:
    """Inserts one all-reduce for a bucket; returns the replacement of each wait."""
    last = bucket.blocks[-1].comm_node
    waits = [block.wait_nodes[0] for block in bucket.blocks]
    overtaken = [node for node in bucket.behind if node < last]
    with graph.inserting_before(last):
        launch, sizes, places = _launch(graph, bucket.blocks)
    with graph.inserting_before(first_reader(last, min(waits), set(overtaken))):
        results = _receive(graph, launch, waits, sizes, places)
    copy_sent_names(bucket.blocks, launch)
    old = set(waits)
    move_after([node for node in overtaken if node not in old], results[-1])
    return dict(zip(waits, results, strict=True))


def _launch(graph: fx.Graph, blocks: Sequence[CommBlock]) -> tuple[fx.Node, list[int], list[int]]:
    """Launches one all-reduce of all members, concatenated in one tensor.

    Returns:
        The launch, the sizes of the parts of what it sends, and which part is which member.
    """
    like = blocks[-1].comm_node
    members, factor = flat_members(graph, blocks)
    alignment = ALIGNMENT_BYTES // blocks[-1].dtype.itemsize
    parts: list[fx.Node] = []
    sizes: list[int] = []
    places: list[int] = []
    zeros: dict[int, fx.Node] = {}
    for index, member in enumerate(members):
        places.append(len(parts))
        parts.append(member)
        sizes.append(fake_value(member).numel())
        gap = -sizes[-1] % alignment
        if gap and index + 1 < len(members):
            if gap not in zeros:
                zeros[gap] = communicating(graph, aten.new_zeros.default, (member, [gap]), like)
            parts.append(zeros[gap])
            sizes.append(gap)
    sent = communicating(graph, aten.cat.default, (parts,), like)
    if factor is not None:
        sent = communicating(graph, aten.mul.Tensor, (sent, factor), like)
    launch = communicating(graph, like.target, (sent, *like.args[1:]), like)
    return launch, sizes, places


def _receive(
    graph: fx.Graph,
    launch: fx.Node,
    waits: Sequence[fx.Node],
    sizes: Sequence[int],
    places: Sequence[int],
) -> list[fx.Node]:
    """Waits for a bucket, and cuts the result into the pieces that `waits` returned."""
    wait = communicating(graph, waits[-1].target, (launch,), waits[-1])
    split = communicating(graph, aten.split_with_sizes.default, (wait, list(sizes)), waits[-1])
    results = []
    for old, place in zip(waits, places, strict=True):
        result = communicating(graph, operator.getitem, (split, place), old)
        shape = fake_value(old).shape
        if len(shape) != 1:
            result = communicating(graph, aten.view.default, (result, list(shape)), old)
        results.append(result)
    return results
