"""Hybrid sharding: values are sharded over one process group and replicated over another.

    ranks        group=           replicate_over=      a gradient
    [[0, 1],     a row, [0, 1]    a column, [0, 2]     is scattered along the row, and summed
     [2, 3]]                                           down the column: the sum of all ranks

What is gathered is gathered along a row alone: where rows are machines, in the fast network.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023).
"""

from __future__ import annotations

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import ParallelismError
from graphopt.ir.rank_groups import rank_mesh


def mesh_of_ranks(
    shards: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> tuple[tuple[int, ...], ...]:
    """The mesh of ranks that two groups of this rank span: shard groups are rows, replicas columns.

    Raises:
        ParallelismError: they are no row and column of one mesh.
    """
    row, column = map(dist.get_process_group_ranks, (shards, replicas))
    mesh = rank_mesh(row, column)
    if mesh is None:
        raise ParallelismError(
            f"replicate_over has the ranks {column}, and group {row}: with this rank,"
            f" {dist.get_rank()}, these are no column and row of one mesh\n"
            "  hint:  take the groups of two dimensions of a mesh: mesh = init_device_mesh("
            'device, (2, 4), mesh_dim_names=("replicate", "shard")); graphopt.ZeRO('
            'group=mesh.get_group("shard"), replicate_over=mesh.get_group("replicate"))'
        )
    return mesh


def group_of_mesh(mesh: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, which average the values that are not sharded.

    Raises:
        ParallelismError: there is none.
    """
    ranks = sorted(rank for row in mesh for rank in row)
    found = _compat.group_of_ranks(ranks)
    if found is None:
        raise ParallelismError(
            f"group and replicate_over span the ranks {ranks}, and no process group has just these"
            f"\n  hint:  make one on all ranks, before the step: dist.new_group({ranks})"
        )
    return found
