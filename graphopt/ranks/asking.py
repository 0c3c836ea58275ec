"""What the ranks of a group ask one another on the host in a running call, apart from what their
graphs send: which order a graph launches its collectives in does not matter to it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from graphopt.ranks.failed_runs import said_explained


class Questions:
    """A group of the same ranks for questions alone. To be made by all of them at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._apart = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )

    def alike(self, number: int, step: int) -> bool:
        """Whether all ranks say the same number, and not 0. Waits for all of them.

        Args:
            number: at least 0.
            step: which call of the step function it is about, counted from 1.
        """
        said = torch.tensor([number, -number], dtype=torch.int64)
        with said_explained(self._group, step):
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._apart)
        most, least = said.tolist()
        return bool(number and most == -least)
