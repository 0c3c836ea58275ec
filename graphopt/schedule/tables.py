"""What list scheduling asks about a program, by the numbers of its nodes in the given order.

Computed once for a program, and the same for all policies that are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.program import Message, Program, Storages, touched_storages

_OFF_PATH = 0.25
"""A node is off the path where what has to follow it takes no more than this share of the compute
that stands behind it."""


class Tables:
    """Of one program.

    Attributes:
        missing: of how many others each node needs something.
        users: of each node.
        seconds: of each node.
        at: seconds of compute before each node in the given order.
        launched, waited: the message of each node that launches or waits, else None.
        off_path: whether little has to follow a node: the gradient of a weight, an update.
        touched: storages that each node makes or reads.
        sizes: bytes of storages.
    """

    def __init__(
        self, program: Program, before: Predecessors, storages: Storages | None = None
    ) -> None:
        self.program = program
        order = program.order
        number = {node: index for index, node in enumerate(order)}
        self.number = number
        needed = [{number[source] for source in before[node]} for node in order]
        self.needed = needed
        self.missing = [len(sources) for sources in needed]
        self.users: list[list[int]] = [[] for _ in order]
        for index, sources in enumerate(needed):
            for source in sources:
                self.users[source].append(index)
        self.seconds = [program.seconds.get(node, 0.0) for node in order]
        self.at = np.concatenate([[0.0], np.cumsum(self.seconds)]).tolist()
        self.launched: list[Message | None] = [program.launched.get(node) for node in order]
        self.waited: list[Message | None] = [program.waited.get(node) for node in order]
        self.messages = [
            waited or launched for waited, launched in zip(self.waited, self.launched, strict=True)
        ]
        self.tails = self._tails()
        total = self.at[-1]
        self.off_path = [
            tail + taken < _OFF_PATH * (total - at)
            for tail, taken, at in zip(self.tails, self.seconds, self.at, strict=False)
        ]
        self.touched, self.sizes = touched_storages(program, {} if storages is None else storages)
        self.fullest = _Fullest(self._held())

    def _tails(self) -> list[float]:
        """The longest path behind each node, in seconds of compute and communication."""
        tails = [0.0] * len(self.users)
        for index in range(len(tails) - 1, -1, -1):
            users = self.users[index]
            tail = max([self.seconds[user] + tails[user] for user in users], default=0.0)
            message = self.launched[index]
            tails[index] = tail if message is None else tail + message.transfer.seconds
        return tails

    def _held(self) -> NDArray[np.int64]:
        """Bytes that are held while each node runs, in the given order."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, storages in enumerate(self.touched):
            for storage in storages:
                first.setdefault(storage, index)
                last[storage] = index
        change = np.zeros(len(self.touched) + 1, dtype=np.int64)
        made = np.zeros(len(self.touched), dtype=np.int64)
        for storage, index in first.items():
            change[index] += self.sizes[storage]
            made[index] += self.sizes[storage]
            change[last[storage] + 1] -= self.sizes[storage]
        held: NDArray[np.int64] = change.cumsum()[:-1]
        self.held_before: list[int] = (held - made).tolist()
        return held


class _Fullest:
    """The largest of a range of values, in constant time: maxima of all ranges whose length is a
    power of two (Bender and Farach-Colton, "The LCA problem revisited", LATIN 2000)."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self._levels: list[list[int]] = [values.tolist()]
        width, count = 1, len(values)
        while 2 * width <= count:
            values = np.maximum(values[:-width], values[width:])
            self._levels.append(values.tolist())
            width *= 2

    def within(self, first: int, last: int) -> int:
        """Of positions from `first` to `last`, both included."""
        level = (last - first + 1).bit_length() - 1
        row = self._levels[level]
        return max(row[first], row[last + 1 - (1 << level)])
