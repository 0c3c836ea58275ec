"""One run of list scheduling along a simulated clock; see `graphopt.schedule.overlap`."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

from torch import fx

from graphopt.schedule.program import Message
from graphopt.schedule.tables import ProgramTables

MOST_PASSED = 48
"""The most waiting nodes passed over for one that need not wait."""


_AT_ONCE = 1e-12
"""Seconds of look-ahead for messages whose links are idle now."""


class ListPolicy(NamedTuple):
    """The parameters of one run.

    Attributes:
        deferred: the share of all compute by which nodes off the critical path are deferred.
        passes: True if nodes that would wait are passed over.
    """

    deferred: float
    passes: bool


class ListScheduler:
    """One run of list scheduling over one program.

    Args:
        tables: of the program, in the given order.
        policy: how to decide.
        budget: bytes of live values that are allowed at once.
        reserved: bytes of the budget that nodes ahead of their place may not use.

    Attributes:
        limited: True if more memory would have changed the result.
        end: of the clock, in seconds: when all nodes have run and all messages have arrived.
    """

    def __init__(
        self, tables: ProgramTables, policy: ListPolicy, budget: float, reserved: float = 0.0
    ) -> None:
        self._tables, self._policy, self._budget = tables, policy, budget
        self._early_budget = budget - reserved
        self._order: list[int] = []
        self._now = self.end = 0.0
        self._keys = self._chosen_keys()
        self._missing = list(tables.missing)
        self._done = bytearray(len(tables.missing))
        self._cursor = 0
        self._skipped = bytearray(
            off and (policy.deferred > 0 or message is not None)
            for message, off in zip(tables.messages, tables.off_path, strict=True)
        )
        self._behind = bytearray(self._skipped)
        self._ready: list[tuple[float, int]] = []
        self._ends: dict[Message, float] = {}
        self._free: dict[str, float] = {}
        self._back: list[int] = []
        self._flying: dict[str, deque[int]] = {}
        self._live = 0
        self.limited = False
        self._changed = True
        self._left = list(tables.lives.touches)
        self._there = bytearray(len(tables.lives.sizes))
        self._prepared = tables.prepared
        self._due = self._due_dates()
        groups = dict.fromkeys(message.group for message in tables.program.messages)
        self._queues = {group: _Queue(self._done, tables.number) for group in groups}
        for message in tables.prepared:
            self._queues[message.group].prepare(self._due[message], message)

    def run(self) -> list[fx.Node]:
        """Returns the new order of nodes."""
        tables = self._tables
        for index, missing in enumerate(tables.missing):
            if not missing:
                self._push(index)
        for index, node in enumerate(tables.program.order):
            if node.op == "placeholder":
                self._execute(index)
        count = len(tables.missing)
        while len(self._order) < count:
            if self._changed:
                self._launch_for(_AT_ONCE, -math.inf)
                self._changed = False
            index = self._next()
            seconds = tables.seconds[index] or max(0.0, self._stall(index))
            if seconds:
                self._launch_for(seconds, min(self._keys[index], self._keys[self._front()]))
                self._changed = True
            if not self._done[index]:
                self._execute(index)
        self.end = max([self._now, *self._free.values()])
        nodes = tables.program.order
        return [nodes[index] for index in self._order]

    def _chosen_keys(self) -> list[float]:
        """Returns each node's priority in seconds of compute: its present place, later if it is off
        the critical path; for waits, the time of their first reader."""
        tables, deferred = self._tables, self._policy.deferred * self._tables.at[-1]
        keys = [
            at + deferred if off else at
            for at, off in zip(tables.at, tables.off_path, strict=False)
        ]
        wanted = list(keys)
        for index in range(len(keys) - 1, -1, -1):
            users = tables.users[index]
            if users and not tables.seconds[index]:
                wanted[index] = min([wanted[user] for user in users])
                if tables.waited[index] is not None:
                    keys[index] = wanted[index]
        return keys

    def _due_dates(self) -> dict[Message, float]:
        """Returns the time at which each message's result is needed."""
        keys, number = self._keys, self._tables.number
        return {
            message: min([keys[number[wait]] for wait in message.waits], default=math.inf)
            for message in self._tables.program.messages
        }

    def _push(self, index: int) -> None:
        message = self._tables.launched[index]
        if message is None:
            heapq.heappush(self._ready, (self._keys[index], index))
            if self._skipped[index] and self._tables.waited[index] is None:
                heapq.heappush(self._back, index)
        else:
            self._queues[message.group].add(self._due[message], message)
            self._changed = True

    def _next(self) -> int:
        """Returns the next node to compute: the first that need not wait and fits into memory."""
        ready, done = self._ready, self._done
        most = MOST_PASSED if self._policy.passes else 1
        passed: list[tuple[float, int]] = []
        chosen = -1
        while ready and len(passed) < most:
            entry = heapq.heappop(ready)
            index = entry[1]
            if done[index]:
                continue
            if self._stall(index) <= 0:
                if self._has_room(index):
                    chosen = index
                    break
                chosen = self._may_free_memory()
            elif most > 1:
                chosen = self._longest_deferred()
            passed.append(entry)
            if chosen >= 0:
                break
        if chosen < 0:
            chosen = self._shortest_wait(passed)
        for entry in passed:
            if entry[1] != chosen:
                heapq.heappush(ready, entry)
        return chosen

    def _may_free_memory(self) -> int:
        """Returns a node that may free memory: a finished wait or the longest deferred node; -1 if
        none."""
        wait = self._arrived()
        return wait if wait >= 0 else self._longest_deferred()

    def _longest_deferred(self) -> int:
        """Returns the node that was passed over for longest if it fits into memory, or -1."""
        back, done = self._back, self._done
        while back and done[back[0]]:
            heapq.heappop(back)
        return back[0] if back and back[0] < self._front() and self._has_room(back[0]) else -1

    def _arrived(self) -> int:
        """Returns the wait for an arrived message, whose sent values can then be freed, or -1."""
        for flying in self._flying.values():
            while flying and self._done[flying[0]]:
                flying.popleft()
            if flying and self._stall(flying[0]) <= 0:
                return flying[0]
        return -1

    def _shortest_wait(self, passed: list[tuple[float, int]]) -> int:
        """Returns the wait that ends first; if there is none, a launch; else the first node that
        does not fit."""
        waited = self._tables.waited
        waits = [entry for entry in passed if waited[entry[1]] is not None]
        if len(waits) < len(passed):
            waits += [(math.inf, flying[0]) for flying in self._flying.values() if flying]
        if not waits:
            launch = self._first_launch()
            return passed[0][1] if launch is None else launch
        return min(waits, key=lambda entry: (self._stall(entry[1]), entry))[1]

    def _first_launch(self) -> int | None:
        """Returns the most urgent launch whose inputs are computed, or None."""
        found = (queue.first() for queue in self._queues.values())
        first = min(filter(None, found), default=None)
        return None if first is None else self._tables.number[first[2].launch]

    def _stall(self, index: int) -> float:
        """Returns the seconds that a node would wait for communication."""
        message = self._tables.waited[index]
        return 0.0 if message is None else self._ends[message] - self._now

    def _has_room(self, index: int) -> bool:
        """True if a node's result fits into memory, now and until the place that the node had in
        the given order."""
        made = self._makes(index)
        if not made:
            return True
        growth, budget = 0, self._budget
        if index > self._front():
            growth, budget = self._growth(index), self._early_budget
        if self._back and not self._tables.off_path[index]:
            growth = max(growth, self._makes(self._back[0]))
        return self._within(self._live + made + growth, budget)

    def _within(self, held: float, budget: float) -> bool:
        self.limited |= held > budget
        return held <= budget

    def _growth(self, until: int) -> int:
        """Returns the largest growth of memory from here to a place in the given order."""
        front = self._front()
        if until <= front:
            return 0
        # What has been let go of ahead of its place is no room later.
        now = min(self._tables.held_before[front], self._live)
        return max(0, self._tables.fullest.within(front, until) - now)

    def _front(self) -> int:
        """Returns the place of the first node that has not run, not counting launches, waits and
        nodes off the critical path."""
        found = self._behind.find(0, self._cursor)
        self._cursor = found if found >= 0 else len(self._behind) - 1
        return self._cursor

    def _makes(self, index: int) -> int:
        there, lives, made = self._there, self._tables.lives, 0
        for key in lives.touched[index]:
            if not there[key]:
                made += lives.sizes[key]
        return made

    def _execute(self, index: int) -> None:
        tables = self._tables
        self._done[index] = self._behind[index] = 1
        self._order.append(index)
        message = tables.launched[index]
        if message is not None:
            self._send(message)
        message = tables.waited[index]
        if message is not None:
            self._now = max(self._now, self._ends[message])
        self._now += tables.seconds[index]
        there, left, sizes = self._there, self._left, tables.lives.sizes
        for key in tables.lives.touched[index]:
            if not there[key]:
                there[key] = 1
                self._live += sizes[key]
            left[key] -= 1
            if not left[key]:
                self._live -= sizes[key]
        missing = self._missing
        for user in tables.users[index]:
            missing[user] -= 1
            if not missing[user] and not self._done[user]:
                self._push(user)

    def _send(self, message: Message) -> None:
        names = (f"group {message.group}", *message.transfer.links)
        start = max([self._now, *(self._free.get(name, 0.0) for name in names)])
        end = start + message.transfer.seconds
        self._ends[message] = end
        if message.waits and message.kind.startswith("reduce_scatter"):
            first = self._tables.number[message.waits[0]]
            self._flying.setdefault(message.group, deque()).append(first)
        for name in names:
            self._free[name] = end

    def _launch_for(self, seconds: float, reached: float) -> None:
        """Launches messages that keep links busy for `seconds`, or are due by `reached`."""
        number = self._tables.number
        for group, queue in self._queues.items():
            until = self._now + seconds
            while self._free.get(f"group {group}", 0.0) < until or queue.due <= reached:
                message = self._most_urgent(queue, until, reached)
                if message is None:
                    break
                for index in (*self._prepared.get(message, ()), number[message.launch]):
                    if not self._done[index]:
                        self._execute(index)

    def _most_urgent(self, queue: _Queue, until: float, reached: float) -> Message | None:
        """Returns the message with the earliest due date whose link is idle before `until`, or
        which is due by `reached`."""
        for due, _, message in queue.candidates():
            if due <= reached:
                return message
            names = (f"group {message.group}", *message.transfer.links)
            if max([self._free.get(name, 0.0) for name in names]) >= until:
                continue
            place = self._tables.number[message.launch]
            ready = not self._missing[place]
            if (ready and place <= self._front()) or self._fits(message):
                return message
        return None

    def _fits(self, message: Message) -> bool:
        """True if a message fits into memory until the place of its launch in the given order."""
        growth = self._growth(self._tables.number[message.launch])
        while not self._within(self._live + message.nbytes + growth, self._early_budget):
            wait = self._arrived()
            if wait < 0:
                return False
            self._execute(wait)
        return True


_Urgent = tuple[float, int, Message]
"""Due date, index and message."""


class _Queue:
    """The launchable messages of one group: those with computed inputs, and those that need little
    compute first.

    Args:
        done: of each node, whether it has run.
        number: of each node.
    """

    def __init__(self, done: bytearray, number: dict[fx.Node, int]) -> None:
        self._done, self._number = done, number
        self._ready: list[_Urgent] = []
        self._prepared: list[_Urgent] = []

    def add(self, due: float, message: Message) -> None:
        heapq.heappush(self._ready, (due, message.index, message))

    def prepare(self, due: float, message: Message) -> None:
        heapq.heappush(self._prepared, (due, message.index, message))

    @property
    def due(self) -> float:
        """Returns the earliest due date in the queue, messages launched meanwhile included."""
        ready = self._ready[0][0] if self._ready else math.inf
        return min(ready, self._prepared[0][0]) if self._prepared else ready

    def first(self) -> _Urgent | None:
        """Returns the most urgent message whose inputs are computed, or None."""
        return self._first_of(self._ready)

    def candidates(self) -> list[_Urgent]:
        """Returns the most urgent message of both kinds."""
        found = {self._first_of(self._ready), self._first_of(self._prepared)}
        return sorted(entry for entry in found if entry is not None)

    def _first_of(self, entries: list[_Urgent]) -> _Urgent | None:
        while entries and self._done[self._number[entries[0][2].launch]]:
            heapq.heappop(entries)
        return entries[0] if entries else None
