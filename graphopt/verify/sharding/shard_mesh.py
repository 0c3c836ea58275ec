"""The mesh of ranks over which a sharded step is proven: shard groups and replica groups.

With hybrid sharding, a second group contains the ranks with the same rows. The two groups are a row
and a column of the mesh of all ranks. A sum over a row, summed down the column, is the sum over all
ranks, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphopt import _compat
from graphopt.ir.rank_groups import rank_mesh


@dataclass(frozen=True)
class RanksOfGroup:
    """A process group and its number of ranks.

    Attributes:
        count: the number of ranks.
        group: the name of the group.
    """

    count: int
    group: str


@dataclass(frozen=True)
class ShardMesh:
    """The ranks that run one sharded step, as one group or as a two-dimensional mesh.

    Attributes:
        shards: the ranks that share the rows of a value.
        everyone: all ranks.
        replicas: the group of ranks with the same rows, or None if each rank has its own.
    """

    shards: RanksOfGroup
    everyone: RanksOfGroup
    replicas: str | None = None

    @classmethod
    def of(cls, everyone: RanksOfGroup, axes: Sequence[str]) -> ShardMesh | None:
        """Returns the mesh that the groups `axes` span, or None if they span none.

        Args:
            everyone: as markers have it.
            axes: names of the groups along the axes; none, or one: all share the rows of a value.
        """
        if len(axes) < 2:
            return cls(everyone, everyone)
        replicas, shards = axes
        row, column, all_ranks = map(_compat.ranks_of_group, (shards, replicas, everyone.group))
        if row is None or column is None or all_ranks is None:
            return None
        rows = rank_mesh(row, column)
        if rows is None or sorted(rank for each in rows for rank in each) != sorted(all_ranks):
            return None
        return cls(RanksOfGroup(len(row), shards), everyone, replicas)
