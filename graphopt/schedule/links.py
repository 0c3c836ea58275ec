"""A fluid model of links: simultaneous transfers share each link fairly.

A group is a queue: its first message is *active*, all others wait behind it. An active message
first takes its latency, which needs no link, then its transfer. Those that transfer at once have
max-min fair rates (Bertsekas and Gallager, "Data networks", section 6.5.2): of all links, the one
that gives the smallest share decides it for its messages, and so on with what is left.

A link that a token bucket holds to its rate saves what it does not use, up to a *burst*, and gives
what it has saved at once to the next transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphopt.schedule.program import Message

CAPACITY = 1.0
"""The capacity of each link: a single message transfers at rate 1."""


HandedOn = dict[tuple[str, str], float]
"""``("group", name)`` -> seconds of unsent backlog, ``("link", name)`` -> saved burst seconds."""


@dataclass(eq=False)
class MessageInFlight:
    """A message of one iteration in transfer.

    Attributes:
        message: of the program.
        launched: seconds at its launch.
        start: seconds when it became first in its group's queue, or None.
        end: seconds at its arrival, or None.
        behind: the message before it in its group's queue at its launch, or None.
    """

    message: Message
    launched: float
    start: float | None = None
    end: float | None = None
    behind: MessageInFlight | None = None
    latency_left: float = field(init=False)
    transfer_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.latency_left = self.message.transfer.latency
        self.transfer_left = self.message.transfer.transfer


class Links:
    """The state of all groups and links at one time.

    Args:
        burst: seconds of transfer that each link saves at most.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self.burst = burst
        self._saved: dict[str, float] = {}
        self._now = 0.0
        self._queues: dict[str, deque[MessageInFlight]] = {}
        self._rates: dict[tuple[tuple[str, ...], ...], list[float]] = {}
        self.busy = 0
        """The number of groups with messages in transfer."""

    def launch(self, flight: MessageInFlight) -> None:
        """Appends a message to its group's queue."""
        self._idle(flight.launched)
        queue = self._queues.setdefault(flight.message.group, deque())
        if queue:
            flight.behind = queue[-1]
        else:
            flight.start = flight.launched
            self.busy += 1
            self._spend(flight)
        queue.append(flight)

    def handed_on(self, now: float) -> HandedOn:
        """Returns the link state that an iteration ending now leaves to the next one."""
        self._idle(now)
        unsent = {
            ("group", name): sum(flight.latency_left + flight.transfer_left for flight in queue)
            for name, queue in self._queues.items()
        }
        return {**unsent, **{("link", name): saved for name, saved in self._saved.items()}}

    def skip_iterations(self, growth: HandedOn, iterations: int) -> None:
        """Advances the state by `iterations` that each add `growth`."""
        for (kind, name), more in growth.items():
            if kind == "link":
                saved = self._saved[name] + more * iterations
                self._saved[name] = min(self.burst, max(0.0, saved))
            else:
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
        self._now = now + seconds
        if self.burst:
            self._save(seconds, _used(heads, rates))
        for flight, rate in zip(heads, rates, strict=True):
            if flight.latency_left > 0:
                flight.latency_left = _left(flight.latency_left, seconds)
                self._spend(flight)
            else:
                flight.transfer_left = _left(flight.transfer_left, seconds * rate)
            if flight.latency_left <= 0 and flight.transfer_left <= 0:
                self._arrive(flight, now + seconds)

    def _arrive(self, flight: MessageInFlight, now: float) -> None:
        flight.end = now
        queue = self._queues[flight.message.group]
        queue.popleft()
        if queue:
            queue[0].start = now
            self._spend(queue[0])
        else:
            self.busy -= 1

    def _idle(self, now: float) -> None:
        """Credits links for the idle time since the last change."""
        self._save(now - self._now, {})
        self._now = now

    def _save(self, seconds: float, used: Mapping[str, float]) -> None:
        """Credits links with the capacity not used for `seconds`, at most `burst`."""
        for link, saved in self._saved.items():
            left = CAPACITY - used.get(link, 0.0)
            self._saved[link] = min(self.burst, saved + seconds * left)

    def _spend(self, flight: MessageInFlight) -> None:
        """Spends the links' saved credit on a transfer that begins."""
        links = flight.message.transfer.links
        if not self.burst or not links or flight.latency_left > 0:
            return
        taken = min(flight.transfer_left, *(self._saved.get(link, self.burst) for link in links))
        flight.transfer_left -= taken
        for link in links:
            self._saved[link] = self._saved.get(link, self.burst) - taken

    def _state(self) -> tuple[list[MessageInFlight], list[float]]:
        """Returns the active messages and the rate of each."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        if len(heads) == 1:
            return heads, [CAPACITY]
        wanted = tuple(
            () if flight.latency_left > 0 else flight.message.transfer.links for flight in heads
        )
        if wanted not in self._rates:
            self._rates[wanted] = fair_rates(wanted)
        return heads, self._rates[wanted]


def _used(heads: Sequence[MessageInFlight], rates: Sequence[float]) -> dict[str, float]:
    """Returns the used share of each link's capacity."""
    used: dict[str, float] = {}
    for flight, rate in zip(heads, rates, strict=True):
        for link in flight.message.transfer.links if flight.latency_left <= 0 else ():
            used[link] = used.get(link, 0.0) + rate
    return used


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
