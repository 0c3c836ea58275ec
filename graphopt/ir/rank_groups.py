"""Ranks of process groups: shifted copies of a group, and the mesh that two groups span.

copies of [0, 2] among four ranks      [0, 2] and [1, 3]
mesh of [2, 3] and [0, 2], on rank 2   [[0, 1], [2, 3]]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def shifted_copies(ranks: Sequence[int]) -> Iterator[list[int]]:
    """Yields a group of ranks and its shifted copies, while they do not overlap.

    >>> from itertools import islice
    >>> from graphopt.ir.rank_groups import shifted_copies
    >>> list(islice(shifted_copies([0, 2]), 3))
    [[0, 2], [1, 3], [4, 6]]
    """
    offsets = [rank - min(ranks) for rank in sorted(ranks)]
    taken: set[int] = set()
    lowest = 0
    while True:
        while lowest in taken:
            taken.remove(lowest)
            lowest += 1
        copy = [lowest + offset for offset in offsets]
        if taken.intersection(copy):
            return
        taken.update(copy)
        yield copy


def rank_mesh(along: Sequence[int], across: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the rows of the mesh of ranks that two groups span, or None if they span none.

    Args:
        along: the ranks of the first group, which is one row of the mesh.
        across: the ranks of the second one, which is one column.

    Returns:
        The rows; None where these are no row and column of one mesh of several of both.

    >>> from graphopt.ir.rank_groups import rank_mesh
    >>> rank_mesh([2, 3], [0, 2])
    ((0, 1), (2, 3))
    """
    common = set(along).intersection(across)
    if len(common) != 1 or len(along) < 2 or len(across) < 2:
        return None
    (corner,) = common
    rows = tuple(tuple(rank - corner + first for rank in along) for first in across)
    ranks = [rank for row in rows for rank in row]
    return rows if len(set(ranks)) == len(ranks) and min(ranks) >= 0 else None
