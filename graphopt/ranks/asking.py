"""What the ranks of a group ask one another on the host in a running call, apart from what their
graphs send: which order a graph launches its collectives in does not matter to it."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphopt.ranks.failed_runs import said_explained

_made: WeakKeyDictionary[dist.ProcessGroup, Questions] = WeakKeyDictionary()


class Questions:
    """A group of the same ranks for questions alone. To be made by all of them at once."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Questions:
        """The one of a group, made when it is asked for first, by all ranks then."""
        if group not in _made:
            _made[group] = cls(group)
        return _made[group]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        apart = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
        assert isinstance(apart, dist.ProcessGroup), "this rank is in it"
        self._apart = apart

    def alike(self, number: int, step: int) -> bool:
        """Whether all ranks say the same number, and not 0. Waits for all of them.

        Args:
            number: at least 0.
            step: which call of the step function it is about, counted from 1.
        """
        said = torch.tensor([number, -number], dtype=torch.int64)
        group = self._group()
        assert group is not None, "who asks has it"
        with said_explained(group, step):
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._apart)
        most, least = said.tolist()
        return bool(number and most == -least)
