"""Explanations why all-reduces that might form buckets were not fused."""

from __future__ import annotations

from collections import Counter

from torch import fx

from graphopt.comm.blocks import CommBlock, get_all_comm_blocks
from graphopt.comm.buckets import pinned_nodes, why_not_fusable
from graphopt.readable.columns import readable_bytes


def why_unfused(gm: fx.GraphModule, limits: tuple[int, int]) -> str:
    """Returns a text that says why no all-reduce of a graph was fused.

    Args:
        limits: bytes at which the first bucket closes, and at which later ones do.

    >>> from graphopt.comm.unfused import why_unfused
    >>> why_unfused(gm, (1, 1))
    'each of 2 all-reduces fills a bucket by itself: 8 B and more, where buckets close at 1 B'
    """
    blocks = get_all_comm_blocks(gm, "all_reduce")
    if not blocks:
        return "the graph has no all-reduce: several ranks, or graphopt.testing.fake_ranks, have"
    if len(blocks) == 1:
        return "there is one all-reduce, and nothing to fuse it with"
    pinned = pinned_nodes(gm.graph)
    reasons = [why_not_fusable(block, pinned) for block in blocks]
    left = [block for block, reason in zip(blocks, reasons, strict=True) if reason is None]
    if len(left) > 1:
        return _why_apart(left, limits)
    reason, count = Counter(filter(None, reasons)).most_common(1)[0]
    return f"{count} of {len(blocks)} all-reduces cannot be fused: {reason}"


def _why_apart(blocks: list[CommBlock], limits: tuple[int, int]) -> str:
    """Returns why all-reduces that are each fusable form no buckets."""
    kinds = {(b.group, b.reduce_op, b.dtype, b.device) for b in blocks}
    if len(kinds) == len(blocks):
        return f"each of {len(blocks)} all-reduces has another group, reduction, dtype or device"
    least = min(block.nbytes for block in blocks)
    if least >= limits[0]:
        return (
            f"each of {len(blocks)} all-reduces fills a bucket by itself: {readable_bytes(least)}"
            f" and more, where buckets close at {readable_bytes(limits[0])}"
        )
    return (
        f"between {len(blocks)} all-reduces stand nodes that keep their order: collectives or"
        " updates of state that need one of them, or large gradients that are sent alone"
    )
