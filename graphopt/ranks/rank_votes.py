"""Votes of a group's ranks in a running call, over CPU tensors, apart from what their graphs
send."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import SpmdMismatchError
from graphopt.ranks.failed_runs import sending_explained
from graphopt.ranks.failure_reports import reasons

_made: WeakKeyDictionary[dist.ProcessGroup, RankVotes] = WeakKeyDictionary()


class RankVotes:
    """The channel of a group's votes; all ranks make it at once.

    Args:
        name: a name that nothing else of these ranks has, the same on all of them.
    """

    @classmethod
    def of(cls, group: dist.ProcessGroup, name: str) -> RankVotes:
        """The channel of a group and name, made by all ranks when it is first needed."""
        if group not in _made:
            _made[group] = cls(group, name)
        return _made[group]

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group = weakref.ref(group)
        self._channels = [_compat.gloo_channel(group, name)]
        weakref.finalize(group, self._channels.clear)  # its threads end where the group's do

    def alike(self, number: int, step: int) -> bool:
        """True if all ranks vote for the same number, which is not 0. Waits for all ranks.

        Args:
            number: at least 0.
            step: the number of the step function's call, counted from 1.
        """
        most, least = self._said([number, -number], step)
        return bool(number and most == -least)

    def hear_all(self, step: int) -> None:
        """Votes that this rank goes on with a call. Waits for all ranks.

        Raises:
            SpmdMismatchError: another rank does not.
        """
        other = self._said([0, 0, 0, 0], step)[0] - 1
        if other < 0:
            return
        group = self._group()
        reason = "an error" if group is None else reasons(group, step).get(other, "an error")
        raise SpmdMismatchError(
            f"rank {other} cannot go on with step {step}, so the other ranks end it as well\n"
            f"  rank {other} said:  {reason}"
        )

    def end(self, step: int, number: int | None = None) -> int | None:
        """Votes that this rank does not go on with a call. Waits for all ranks.

        Args:
            number: of the agreement for which it has a graph instead, 0 where it has none yet; None
                where it has failed.

        Returns:
            That number, where all ranks say it; 0 where no rank goes on and none has failed, so
            that all may agree anew; None otherwise.
        """
        group = self._group()
        rank = 0 if group is None else group.rank()
        instead = number or 0
        _, fails, most, least = self._said(
            [1 + rank, -(number is not None), instead, -instead], step
        )
        if fails == 0:
            return None
        return most if most == -least else 0

    def _said(self, numbers: list[int], step: int) -> list[int]:
        """The maximum of each number over all ranks."""
        said = torch.tensor(numbers, dtype=torch.int64)
        group = self._group()
        assert group is not None, "who asks has it"
        with sending_explained(group, step, "all_reduce"):
            _compat.maximum(self._channels[0], said)
        return said.tolist()
