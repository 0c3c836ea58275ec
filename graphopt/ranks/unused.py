"""Exchange of the parameters that ranks leave unused in a call, over the process group's store.

All ranks send gradients of the parameters that they have agreed on, zeros for those that they do
not use. A parameter that some rank uses gets the average; one that no rank uses has no gradient.
Whoever leaves parameters unused has to know which it is; the others have nothing to ask.

    rank 0 (uses a, b)                  launch a, b               update
    rank 1 (uses a)      says: not b    launch a, b   wait a, b   looks: rank 0 has said nothing
                                                                  in this call, so it uses b

A rank says it before it launches anything, so whoever has waited for what all have sent finds all
that was said in this call. Nobody waits for anybody besides, and ranks that use everything neither
say nor look.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphopt import _compat
from graphopt.ranks.failed_runs import sending_explained

_calls: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How many calls of the steps of a topic, whose gradients were averaged, are over."""

_said: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[int, list[int]]]] = WeakKeyDictionary()
"""What this rank has said last in steps of a topic, and in which call: one that fails keeps its
number for the next, also where that is another agreement's or another step function's."""

_KEPT = 4
"""Calls whose keys are different. A rank that is two calls ahead has waited for what all ranks have
sent in between, and nobody reads what was said before it."""


class UnusedParameters:
    """The parameters that each rank of a group leaves unused in calls of one step function.

    Args:
        topic: the same text on all ranks, different for different step functions.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str) -> None:
        self.group, self._topic = group, topic
        self._numbers = _calls.setdefault(group, Counter())
        self._said = _said.setdefault(group, {})

    def say(self, unused: Collection[int]) -> None:
        """Tells the other ranks, before the graph runs, which of the agreed parameters this rank
        does not use, by position."""
        number, now = self._numbers[self._topic], sorted(unused)
        of, last = self._said.get(self._topic, (number, []))
        if now == (last if of == number else []):
            return
        self._said[self._topic] = number, now
        key = self._key(self.group.rank(), number)
        with self._explained():
            store = _compat.default_store()
            store.set(key, json.dumps([number, now]))
            store.get(key)  # the store answers what it is asked in order: it has it now

    def used_anywhere(self, positions: Sequence[int]) -> tuple[int, ...]:
        """A 1 for each given parameter that some rank uses, else 0; called after collectives of
        all ranks."""
        number = self._numbers[self._topic]
        keys = [self._key(rank, number) for rank in range(self.group.size())]
        with self._explained():
            store = _compat.default_store()
            if not store.check(keys):
                return (1,) * len(positions)
            said = [json.loads(text) for text in store.multi_get(keys)]
        unused = [set(theirs) if of == number else set() for of, theirs in said]
        nowhere = set.intersection(*unused)
        return tuple(int(position not in nowhere) for position in positions)

    def over(self) -> None:
        """Ends a call whose gradients were averaged on all ranks."""
        self._numbers[self._topic] += 1

    def _key(self, rank: int, number: int) -> str:
        return f"graphopt/{self.group.group_name}/{self._topic}/unused/{number % _KEPT}/{rank}"

    def _explained(self) -> AbstractContextManager[None]:
        step = self._numbers[self._topic] + 1
        return sending_explained(self.group, step, "exchange", "which parameters are used")
