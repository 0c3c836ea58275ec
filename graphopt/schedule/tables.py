"""Tables of a program for list scheduling, indexed by a node's place in the given order.

Computed once for a program, and the same for all policies that are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import fx

from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.program import LiveStorages, Message, Program, Storages

MOST_PREPARATION = 64
"""The most nodes that a launch may need and still be moved ahead of its place."""

_OFF_PATH = 0.25
"""A node is off the critical path if the work that depends on it takes at most this share of the
remaining compute."""


class ProgramTables:
    """The tables of one program.

    Attributes:
        missing: of how many others each node needs something.
        users: of each node.
        seconds: of each node.
        at: seconds of compute before each node in the given order.
        launched, waited: the message of each node that launches or waits, else None.
        off_path: whether little has to follow a node: the gradient of a weight, an update.
        lives: the storages that the nodes make or read.
        held_before: bytes that are held when each node begins, in the given order.
        fullest: the most that is held between two nodes of the given order.
        prepared: messages that need only inputs of the step and little compute, which can be
            launched ahead of their places, with what computes it.
    """

    def __init__(
        self, program: Program, before: Predecessors, storages: Storages | None = None
    ) -> None:
        self.program = program
        order = program.order
        number = {node: index for index, node in enumerate(order)}
        self.number = number
        self.users: list[list[int]] = [[] for _ in order]
        self.missing = []
        for index, node in enumerate(order):
            needed = {number[source] for source in before[node]}
            self.missing.append(len(needed))
            for source in needed:
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
        self.lives = LiveStorages(program, storages or Storages())
        made, held = self.lives.held(range(len(order)))
        self.fullest = _Fullest(held)
        self.held_before: list[int] = (held - made).tolist()
        self.prepared = _preparations(self, before)

    def _tails(self) -> list[float]:
        """Returns the seconds of the longest path behind each node, in compute and
        communication."""
        tails = [0.0] * len(self.users)
        for index in range(len(tails) - 1, -1, -1):
            users = self.users[index]
            tail = max([self.seconds[user] + tails[user] for user in users], default=0.0)
            message = self.launched[index]
            tails[index] = tail if message is None else tail + message.transfer.seconds
        return tails


class _Fullest:
    """Range-maximum queries in constant time, by a sparse table (Bender and Farach-Colton, "The LCA
    problem revisited", LATIN 2000)."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self.values: list[int] = values.tolist()
        self._levels: list[list[int]] = [self.values]
        width, count = 1, len(values)
        while 2 * width <= count:
            values = np.maximum(values[:-width], values[width:])
            self._levels.append(values.tolist())
            width *= 2

    def within(self, first: int, last: int) -> int:
        """Returns the maximum of positions `first` to `last`, both included."""
        level = (last - first + 1).bit_length() - 1
        row: list[int] = self._levels[level]
        return max(row[first], row[last + 1 - (1 << level)])


def _preparations(tables: ProgramTables, before: Predecessors) -> dict[Message, list[int]]:
    """Returns the messages that need only inputs and little compute, with the nodes that compute
    them."""
    found = {}
    for message in tables.program.messages:
        most = MOST_PREPARATION * max(1, len(message.joined))
        nodes = ancestors(message.launch, before, most)
        if nodes is None:
            continue
        numbers = sorted(tables.number[node] for node in nodes)
        if any(tables.waited[index] is not None for index in numbers):
            continue
        if sum([tables.seconds[index] for index in numbers]) <= message.transfer.seconds:
            found[message] = numbers
    return found


def ancestors(launch: fx.Node, before: Predecessors, most: int) -> set[fx.Node] | None:
    """Returns the nodes that a launch needs, without inputs of the step; None if more than
    `most`."""
    found: set[fx.Node] = set()
    pending = list(before[launch])
    while pending:
        node = pending.pop()
        if node in found or node.op in ("placeholder", "get_attr"):
            continue
        found.add(node)
        if len(found) > most:
            return None
        pending += before[node]
    return found
