"""A fluid model of links: simultaneous transfers share each link fairly.

A group is a queue: its first messages, as many as its backend runs at once, are *active*, all
others wait behind them. An active message first takes its latency, which needs no link, then its
transfer. Those that transfer at once have max-min fair rates (Bertsekas and Gallager, "Data
networks", section 6.5.2): of all links, the one that gives the smallest share decides it for its
messages, and so on with what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from graphopt.schedule.program import Message

CAPACITY = 1.0
"""The capacity of each link: a single message transfers at rate 1."""


HandedOn = dict[str, float]
"""The seconds of unsent backlog of each group."""


@dataclass(eq=False)
class MessageInFlight:
    """A message of one iteration in transfer.

    Attributes:
        message: of the program.
        launched: seconds at its launch.
        start: seconds when it became active, or None.
        end: seconds at its arrival, or None.
    """

    message: Message
    launched: float
    start: float | None = None
    end: float | None = None
    latency_left: float = field(init=False)
    transfer_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.latency_left = self.message.transfer.latency
        self.transfer_left = self.message.transfer.transfer


class Links:
    """The state of all groups and links at one time."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[MessageInFlight]] = {}
        self._rates: dict[tuple[tuple[str, ...], ...], list[float]] = {}
        self.busy = 0
        """The number of groups with messages in transfer."""

    def launch(self, flight: MessageInFlight) -> None:
        """Appends a message to its group's queue."""
        queue = self._queues.setdefault(flight.message.group, deque())
        self.busy += not queue
        queue.append(flight)
        _begin(queue, flight.launched)

    def handed_on(self) -> HandedOn:
        """Returns what an iteration that ends now leaves to the next one."""
        return {
            name: sum(flight.latency_left + flight.transfer_left for flight in queue)
            for name, queue in self._queues.items()
        }

    def skip_iterations(self, growth: HandedOn, iterations: int) -> None:
        """Advances the state by `iterations` that each add `growth`."""
        for name, more in growth.items():
            self._queues[name][-1].transfer_left += more * iterations

    def until_change(self) -> float:
        """Returns the seconds until a latency or a transfer ends."""
        heads, rates = self._state()
        return min(
            flight.latency_left if flight.latency_left > 0 else flight.transfer_left / rate
            for flight, rate in zip(heads, rates, strict=True)
        )

    def advance(self, now: float, seconds: float) -> None:
        """Advances time by `seconds`, at most until the next change."""
        heads, rates = self._state()
        for flight, rate in zip(heads, rates, strict=True):
            if flight.latency_left > 0:
                flight.latency_left = _left(flight.latency_left, seconds)
            else:
                flight.transfer_left = _left(flight.transfer_left, seconds * rate)
            if flight.latency_left <= 0 and flight.transfer_left <= 0:
                self._arrive(flight, now + seconds)

    def _arrive(self, flight: MessageInFlight, now: float) -> None:
        flight.end = now
        queue = self._queues[flight.message.group]
        queue.remove(flight)
        self.busy -= not queue
        _begin(queue, now)

    def _state(self) -> tuple[list[MessageInFlight], list[float]]:
        """Returns the active messages and the rate of each."""
        heads = [flight for queue in self._queues.values() for flight in _active(queue)]
        if len(heads) == 1:
            return heads, [CAPACITY]
        wanted = tuple(
            () if flight.latency_left > 0 else flight.message.transfer.links for flight in heads
        )
        if wanted not in self._rates:
            self._rates[wanted] = fair_rates(wanted)
        return heads, self._rates[wanted]


def _active(queue: deque[MessageInFlight]) -> Iterator[MessageInFlight]:
    return islice(queue, queue[0].message.transfer.at_once if queue else 0)


def _begin(queue: deque[MessageInFlight], now: float) -> None:
    """Starts the messages that have become active."""
    for flight in _active(queue):
        flight.start = now if flight.start is None else flight.start


def _left(before: float, taken: float) -> float:
    """Subtracts `taken`; a remainder within rounding error counts as zero."""
    left = before - taken
    return left if left > 1e-12 * before else 0.0


def fair_rates(wanted: Sequence[tuple[str, ...]]) -> list[float]:
    """Returns max-min fair rates of transfers by progressive filling, given the links that each
    uses; 1 for those without links."""
    rates = [CAPACITY] * len(wanted)
    open_ = {index for index, links in enumerate(wanted) if links}
    left = {link: CAPACITY for links in wanted for link in links}
    while open_:
        count = {link: sum(link in wanted[index] for index in open_) for link in left}
        shares = {link: left[link] / count[link] for link in left if count[link]}
        tightest = min(sorted(shares), key=shares.__getitem__)
        for index in [index for index in open_ if tightest in wanted[index]]:
            rates[index] = shares[tightest]
            open_.discard(index)
            for link in wanted[index]:
                left[link] = max(0.0, left[link] - shares[tightest])
    return rates
