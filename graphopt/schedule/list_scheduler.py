"""One run of list scheduling along a simulated clock; `graphopt.schedule.overlap` says what for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.program import Message, Program, held_bytes, made_bytes

MOST_PREPARATION = 64
"""Nodes that a launch may need beside the inputs of the step and still go ahead of its place."""

_Entry = tuple[int, int, fx.Node]
"""Where a node is wanted in the given order, where it stands, and the node."""


@dataclass
class ListScheduler:
    """One run.

    Attributes:
        program: in the given order.
        before: what each node needs.
        window: how many nodes ahead compute may be taken from.
        holds: whether a message whose input is there may be held back for one that is due earlier.
        budget: bytes of values that may be held at once.
        now: the clock, in seconds.
        order: what has run.
    """

    program: Program
    before: Predecessors
    window: int
    holds: bool
    budget: float
    now: float = 0.0
    order: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = self.program.order
        self._key = _positions(self.program)
        self._users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        self._missing = {}
        for node in nodes:
            needed = set(self.before[node])
            self._missing[node] = len(needed)
            for source in needed:
                self._users[source].append(node)
        self._done: set[fx.Node] = set()
        self._ready: list[_Entry] = []
        self._number = {node: index for index, node in enumerate(nodes)}
        self._ends: dict[Message, float] = {}
        self._free: dict[str, float] = {}
        self._held = held_bytes(self.program)
        self._made = made_bytes(self.program)
        self._early: dict[Message, int] = {}
        self._launchable: list[tuple[float, int]] = []
        self._due = self._due_dates()
        self._prepared = self._preparations()
        self._by_due = sorted(self._prepared, key=lambda m: (self._due[m], m.index))
        self._next_prepared = 0
        self._cursor = 0

    def run(self) -> list[fx.Node]:
        """The new order."""
        for node in self.program.order:
            if not self._missing[node]:
                self._push(node)
        while len(self.order) < len(self.program.order):
            node = self._next()
            seconds = self.program.seconds.get(node, 0.0) or max(0.0, self._stalls(node))
            self._launch_for(seconds, self._number[node])
            if node not in self._done:
                self._execute(node)
        return self.order

    def _push(self, node: fx.Node) -> None:
        message = self.program.launched.get(node)
        if message is None:
            heapq.heappush(self._ready, (self._key[node], self._number[node], node))
        else:
            heapq.heappush(self._launchable, (self._due[message], message.index))

    def _next(self) -> fx.Node:
        """What computes next: the first that need not wait, or else that waits least."""
        passed: list[_Entry] = []
        chosen: _Entry | None = None
        while self._ready and chosen is None:
            entry = heapq.heappop(self._ready)
            if entry[2] in self._done:
                continue
            if passed and entry[0] > passed[0][0] + self.window:
                heapq.heappush(self._ready, entry)
                break
            if self._stalls(entry[2]) <= 0 and (not passed or self._may_overtake(entry[2])):
                chosen = entry
            else:
                passed.append(entry)
        if chosen is None and passed:
            chosen = min(
                (entry for entry in passed if entry[2] in self.program.waited),
                key=lambda entry: (self._stalls(entry[2]), entry[0]),
            )
            passed.remove(chosen)
        for entry in passed:
            heapq.heappush(self._ready, entry)
        return self._forced_launch() if chosen is None else chosen[2]

    def _forced_launch(self) -> fx.Node:
        """Nothing else is left to do."""
        return self.program.messages[self._launchable[0][1]].launch

    def _stalls(self, node: fx.Node) -> float:
        """How long a node would wait."""
        message = self.program.waited.get(node)
        return 0.0 if message is None else self._ends[message] - self.now

    def _execute(self, node: fx.Node) -> None:
        self._done.add(node)
        self.order.append(node)
        message = self.program.launched.get(node)
        if message is not None:
            self._send(message)
        self.now += max(0.0, self._stalls(node)) if node in self.program.waited else 0.0
        self.now += self.program.seconds.get(node, 0.0)
        waited = self.program.waited.get(node)
        if waited is not None:
            self._early.pop(waited, None)
        for user in self._users[node]:
            self._missing[user] -= 1
            if not self._missing[user] and user not in self._done:
                self._push(user)

    def _send(self, message: Message) -> None:
        names = (f"group {message.group}", *message.transfer.links)
        start = max([self.now, *(self._free.get(name, 0.0) for name in names)])
        end = start + message.transfer.seconds
        self._ends[message] = end
        for name in names:
            self._free[name] = end

    def _launch_for(self, seconds: float, reached: int) -> None:
        """Launch what keeps links busy for the next `seconds`, and what is due where `reached`."""
        while True:
            message = self._most_urgent(self.now + seconds, reached)
            if message is None:
                return
            for node in (*self._prepared.get(message, ()), message.launch):
                if node not in self._done:
                    self._execute(node)

    def _most_urgent(self, until: float, reached: int) -> Message | None:
        """The message with the earliest due date that can be launched: on a link that is idle
        before `until`, or because its reader stands before `reached`."""
        for message in self._candidates():
            if message.reader is not None and self._number[message.reader] <= reached:
                return message
            ready = not self._missing[message.launch]
            if ready and not self.holds:
                return message
            names = (f"group {message.group}", *message.transfer.links)
            if max(self._free.get(name, 0.0) for name in names) >= until:
                continue
            if ready or self._fits(message):
                return message
        return None

    def _candidates(self) -> Iterator[Message]:
        """At most one with inputs that are there and one of those that can be prepared per call."""
        while self._launchable:
            message = self.program.messages[self._launchable[0][1]]
            if message.launch not in self._done:
                break
            heapq.heappop(self._launchable)
        while self._next_prepared < len(self._by_due):
            if self._by_due[self._next_prepared].launch not in self._done:
                break
            self._next_prepared += 1
        found = []
        if self._launchable:
            found.append(self.program.messages[self._launchable[0][1]])
        if self._next_prepared < len(self._by_due):
            found.append(self._by_due[self._next_prepared])
        yield from sorted(set(found), key=lambda m: (self._due[m], m.index))

    def _fits(self, message: Message) -> bool:
        """Whether there is room for a message until it would be launched in the given order."""
        first = self._number[self._first_undone()]
        last = self._number[message.launch]
        if last <= first:
            return True
        if not self._room_for(message.nbytes, first, last):
            return False
        self._early[message] = message.nbytes
        return True

    def _room_for(self, nbytes: int, first: int, last: int) -> bool:
        """Whether the given order leaves room from one position to another."""
        fullest = int(self._held[first:last].max(initial=0))
        return fullest + sum(self._early.values()) + nbytes <= self.budget

    def _may_overtake(self, node: fx.Node) -> bool:
        """Whether there is room for what a node makes until its place in the given order."""
        made = self._made.get(node, 0)
        first, last = self._number[self._first_undone()], self._number[node]
        return not made or self._room_for(made, first, last)

    def _first_undone(self) -> fx.Node:
        while self.program.order[self._cursor] in self._done:
            self._cursor += 1
        return self.program.order[self._cursor]

    def _due_dates(self) -> dict[Message, float]:
        """Seconds of compute before the first reader of each message."""
        passed, at = 0.0, {}
        for node in self.program.order:
            at[node] = passed
            passed += self.program.seconds.get(node, 0.0)
        return {m: passed if m.reader is None else at[m.reader] for m in self.program.messages}

    def _preparations(self) -> dict[Message, list[fx.Node]]:
        """Messages that need only inputs of the step and little compute, with what computes it."""
        found = {}
        for message in self.program.messages:
            most = MOST_PREPARATION * max(1, len(message.joined))
            nodes = ancestors(message.launch, self.before, most)
            if nodes is None or any(n in self.program.waited for n in nodes):
                continue
            seconds = sum(self.program.seconds.get(node, 0.0) for node in nodes)
            if seconds <= message.transfer.seconds:
                found[message] = sorted(nodes, key=self._number.__getitem__)
        return found


def _positions(program: Program) -> dict[fx.Node, int]:
    """Where nodes stand; a wait, and the views after it, where the first reader does."""
    found = {node: index for index, node in enumerate(program.order)}
    for message in program.messages:
        if message.reader is not None:
            for wait in message.waits:
                found[wait] = found[message.reader]
    return found


def ancestors(launch: fx.Node, before: Predecessors, most: int) -> set[fx.Node] | None:
    """What a launch needs, without inputs of the step; None if that is more than `most` nodes."""
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
