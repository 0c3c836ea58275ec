"""Sizes in bytes at which buckets close: given, or chosen by cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from torch import fx

from graphopt.comm import CommBlock
from graphopt.cost import default_cost_model
from graphopt.schedule.granularity import collectives_by_cost

MEGABYTE = 2**20
FIRST_BUCKET_BYTES = MEGABYTE
SMALLEST_BUCKET_BYTES = MEGABYTE // 4
HUGE = 4
"""Gradients larger than this multiple of a bucket are ignored when the bucket size is chosen."""


def bucket_limits(
    graph: fx.Graph,
    blocks: Mapping[fx.Node, CommBlock],
    bucket_size_mb: float,
    min_buckets: int | None,
) -> tuple[int, int]:
    """Returns the sizes in bytes at which the first bucket and all others close.

    Args:
        blocks: what may be fused, by launch.
        bucket_size_mb: after which a bucket closes; the first one closes at 1 MB.
        min_buckets: how many there are to be at least, but none below 256 KB; None: by cost.

    Raises:
        ValueError: neither is such a number; says which ones are.
    """
    size = min(_bytes_of(bucket_size_mb), _share(graph, blocks, min_buckets))
    return min(FIRST_BUCKET_BYTES, size), size


def _share(graph: fx.Graph, blocks: Mapping[fx.Node, CommBlock], min_buckets: int | None) -> int:
    """Returns the size in bytes at which a bucket closes so that there are `min_buckets`."""
    _check_count(min_buckets)
    if min_buckets == 1:
        return sys.maxsize
    count = min_buckets or collectives_by_cost(graph, list(blocks), default_cost_model(graph))
    return max(SMALLEST_BUCKET_BYTES, _limit([block.nbytes for block in blocks.values()], count))


def _limit(sizes: Sequence[int], count: int) -> int:
    """Returns the bucket size in bytes that gives about `count` buckets; much larger gradients
    count as a bucket each."""
    rest = sorted(sizes)
    limit = math.ceil(sum(rest) / count)
    while rest and rest[-1] >= HUGE * limit and count > 1:
        rest.pop()
        count -= 1
        limit = math.ceil(sum(rest) / count)
    return limit


def _check_count(count: int | None) -> None:
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 1):
        return
    raise ValueError(
        f"min_buckets={count!r}: give how many buckets there are to be, a whole number from 1"
        " (which leaves it to bucket_size_mb), or None for a number by cost"
    )


def _bytes_of(bucket_size_mb: float) -> int:
    is_number = isinstance(bucket_size_mb, (int, float)) and not isinstance(bucket_size_mb, bool)
    if not is_number or not bucket_size_mb > 0:
        raise ValueError(
            f"bucket_size_mb={bucket_size_mb!r}: give the size of a bucket in megabytes, a number"
            " above 0 (DistributedDataParallel's is 25)"
        )
    return sys.maxsize if math.isinf(bucket_size_mb) else math.ceil(bucket_size_mb * MEGABYTE)
