"""Choice of buckets of all-gathers and reduce-scatters by their launch cost.

Each collective takes time to start that depends on no size (latency, a launch), and then time for
its bytes. A bucket takes members until starting it is no more than a share of its time. The fewer
buckets, the less starting; the larger, the longer what is needed first waits for the rest, and the
more memory. So buckets are simulated (`graphopt.schedule.overlap`), and given up where memory is
short (`crowded`).

Members must be able to stand side by side. Each launch has a *window* of places in the given order:

    from    its own place; or the begin, where it needs only inputs of the step and what is
            computed of them, and no wait (a gather of parameters)
    until   what first needs that its wait is over; or the end, where no other scatter depends on
            it, since all that does then can stand at the end (an update of a parameter)

Where all windows of a bucket have a place in common, all of its launches go there, and their waits
behind it. That holds for any number of buckets at once: whatever order is found for one, there is
one for all. Launches among what would move to the end have buckets of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from graphopt.cost import Collective, CostModel, Transfer, collective_of
from graphopt.cost.collectives import in_one_call
from graphopt.graph_utils import is_wait
from graphopt.ir.views import is_only_view, view_tail
from graphopt.schedule.bucketing import SCATTER, BucketKind, bucket_kind
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.program import Message, Program
from graphopt.schedule.tables import MOST_PREPARATION, ancestors

Buckets = tuple[tuple[fx.Node, ...], ...]

_GAIN = 1e-6
"""The relative gain in time from which two messages are joined."""


class Window(NamedTuple):
    """The places in the given order where a launch may stand: from `first` to before `end`.

    Attributes:
        behind: whether it stands among what would move to the end.
    """

    first: float
    end: float
    behind: bool

    def within(self, other: Window) -> Window:
        """Returns the intersection of two windows."""
        return Window(max(self.first, other.first), min(self.end, other.end), self.behind)


@dataclass
class _Filling:
    """A bucket that still takes members.

    Attributes:
        messages: its members.
        collective: that sends all.
        window: the places that all members have in common.
        transfer: what it asks for.
    """

    messages: list[Message]
    collective: Collective
    window: Window
    transfer: Transfer


class BucketChooser:
    """Chooses the buckets of one program.

    Args:
        program: in the given order, without late nodes.
        before: what each of its nodes needs.
        cost_model: says what a bucket takes.
        world_size: ranks of its groups, where these are not there to be asked.
    """

    def __init__(
        self,
        program: Program,
        before: Predecessors,
        cost_model: CostModel,
        world_size: int | None = None,
    ) -> None:
        self._program, self._before, self._costs = program, before, cost_model
        kinds = ((message, bucket_kind(message.launch)) for message in program.messages)
        self._kinds: dict[Message, BucketKind] = {m: kind for m, kind in kinds if kind is not None}
        self._collectives = {m: collective_of(m.launch, world_size) for m in self._kinds}
        self._number = {node: index for index, node in enumerate(program.order)}
        self._windows = _windows(program, before, self._kinds)

    def choose(self, share: float) -> Buckets:
        """Returns buckets of at least two members.

        Args:
            share: of the time of a bucket that starting it takes, when it closes.
        """
        filling: dict[BucketKind, _Filling] = {}
        found: list[_Filling] = []
        for message, kind in self._kinds.items():
            key = (*kind, self._windows[message].behind)
            bucket = filling.get(key)
            if bucket is None or not self._add(bucket, message):
                window, collective = self._windows[message], self._collectives[message]
                bucket = _Filling([message], collective, window, message.transfer)
                filling[key] = bucket
                found.append(bucket)
            if _starting(bucket.transfer) <= share * _taken(bucket.transfer):
                del filling[key]
        several = [bucket.messages for bucket in found if len(bucket.messages) > 1]
        return tuple(tuple(message.launch for message in members) for members in several)

    def _add(self, bucket: _Filling, message: Message) -> bool:
        """Adds a message to a bucket if a common place exists and saves time. Returns if it was
        added."""
        window = bucket.window.within(self._windows[message])
        collective = in_one_call([bucket.collective, self._collectives[message]])
        if window.first >= window.end:
            return False
        transfer = self._costs.transfer_of(collective)
        if _taken(transfer) >= (1 - _GAIN) * (_taken(bucket.transfer) + _taken(message.transfer)):
            return False
        bucket.messages.append(message)
        bucket.collective, bucket.window, bucket.transfer = collective, window, transfer
        return True

    def planned(self, buckets: Buckets) -> tuple[Program, Predecessors]:
        """Returns the program with buckets as messages, and its dependencies: all launches of a
        bucket precede the last one, which all its waits need."""
        launched = self._program.launched
        instead = {
            bucket[-1]: self._joined([launched[node] for node in bucket]) for bucket in buckets
        }
        gone = {node for bucket in buckets for node in bucket}
        messages = [
            instead.get(message.launch, message)
            for message in self._program.messages
            if message.launch in instead or message.launch not in gone
        ]
        seconds = {n: taken for n, taken in self._program.seconds.items() if n not in gone}
        before = dict(self._before)
        for launch, message in instead.items():
            if message.transfer.overhead:
                seconds[launch] = message.transfer.overhead
            before[launch] = [*before[launch], *message.joined[:-1]]
            for wait in message.waits:
                before[wait] = [*before[wait], launch]
        order, late = self._program.order, self._program.late
        numbered = [replace(message, index=index) for index, message in enumerate(messages)]
        return Program(order, late, seconds, numbered), before

    def _joined(self, members: list[Message]) -> Message:
        number = self._number
        readers = (message.reader for message in members if message.reader is not None)
        waits = (wait for message in members for wait in message.waits)
        return Message(
            index=0,
            launch=members[-1].launch,
            transfer=self._costs.transfer_of(in_one_call([self._collectives[m] for m in members])),
            nbytes=sum(message.nbytes for message in members),
            lag=0,
            waits=tuple(sorted(waits, key=number.__getitem__)),
            reader=min(readers, key=number.__getitem__, default=None),
            joined=tuple(message.launch for message in members),
        )


def _starting(transfer: Transfer) -> float:
    return transfer.latency + transfer.overhead


def _taken(transfer: Transfer) -> float:
    return transfer.seconds + transfer.overhead


def side_by_side(order: Iterable[fx.Node], messages: Iterable[Message]) -> list[fx.Node]:
    """Returns the order with each bucket's launches at its last launch and its waits at its first
    wait; in-place updates of sent values follow them."""
    buckets = [message for message in messages if message.joined]
    at_launch = {message.launch: message.joined for message in buckets}
    at_wait = {wait: message.waits for message in buckets for wait in message.waits}
    moved = {node for joined in at_launch.values() for node in joined[:-1]}
    found: list[fx.Node] = []
    done: set[fx.Node] = set()
    for node in order:
        if node in moved or node in done:
            continue
        together = at_launch.get(node) or at_wait.get(node) or (node,)
        found += together
        done.update(together)
    return found


def crowded(program: Program, full: NDArray[np.int64]) -> set[tuple[fx.Node, ...]]:
    """Returns the buckets whose values are alive at some of the places `full` in the order."""
    position = {node: index for index, node in enumerate(program.order)}
    found = set()
    for message in program.messages:
        sent = (node for launch in message.joined for node in launch.all_input_nodes)
        made = [position[node] for node in sent if node.op != "placeholder"]
        begin = min([position[message.launch], *made])
        end = max((_first_read(wait, position) for wait in message.waits), default=begin)
        if message.joined and np.searchsorted(full, begin) < np.searchsorted(full, end, "right"):
            found.add(message.joined)
    return found


def _first_read(wait: fx.Node, position: dict[fx.Node, int]) -> int:
    tail = view_tail(wait)
    readers = {user for node in tail for user in node.users}.difference(tail)
    return min((position[reader] for reader in readers), default=position[wait])


def _windows(
    program: Program, before: Predecessors, kinds: dict[Message, BucketKind]
) -> dict[Message, Window]:
    number = {node: index for index, node in enumerate(program.order)}
    ends = _ends(program, before, number)
    free = _scatters_for_the_end(program, before, kinds)
    behind = _descendants(program, before, {wait for message in free for wait in message.waits})
    found = {}
    for message in kinds:
        needed = ancestors(message.launch, before, MOST_PREPARATION)
        early = needed is not None and not any(map(is_wait, needed))
        end = math.inf if message in free else ends.get(message.waits[0], math.inf)
        first = 0.0 if early else float(number[message.launch])
        found[message] = Window(first, end, message.launch in behind)
    return found


def _ends(
    program: Program, before: Predecessors, number: dict[fx.Node, int]
) -> dict[fx.Node, float]:
    """Maps each node to the place of its first dependent that is more than a view, which would move
    along."""
    found: dict[fx.Node, float] = {}
    for node in reversed(program.order):
        for source in before[node]:
            moves = is_only_view(node, source)
            place = found.get(node, math.inf) if moves else number[node]
            found[source] = min(found.get(source, math.inf), place)
    return found


def _scatters_for_the_end(
    program: Program, before: Predecessors, kinds: dict[Message, BucketKind]
) -> set[Message]:
    """Returns the reduce-scatters whose results no other collective depends on."""
    scatters = {m.launch for m, kind in kinds.items() if kind[0] == SCATTER}
    leads: set[fx.Node] = set()
    for node in reversed(program.order):
        if node in scatters or node in leads:
            leads.update(before[node])
    return {m for m in kinds if m.launch in scatters and m.waits[0] not in leads}


def _descendants(program: Program, before: Predecessors, roots: set[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in program.order:
        if not found.isdisjoint(before[node]):
            found.add(node)
    return found
