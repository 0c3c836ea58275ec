"""Agreement of a group's ranks through the store of their process group.

All ranks of a group come to a *meeting* together. It has rounds; in each of them every rank says
something and learns what all the others said:

    with Meeting(channel) as meeting:
        everyone = meeting.exchange({"used": […]})     # round 1
        everyone = meeting.exchange({"plan": […]})     # round 2

The first to decide a round decides it for all: the last rank to come (it has succeeded), or the
first that gives up (it has failed, and so has the meeting). So no rank goes on where another has
given up, whatever came first on the network. A rank gives up when it has waited for too long, when
a process it waits for has ended, or when it leaves the `with` by an exception of any kind: the
others then learn why instead of waiting.

Meetings on one topic are numbered by each rank for itself, and the numbers stay equal: a failed
meeting fails on every rank, and all of them come to the next one. The one exception is a rank that
was not there when the others gave up waiting for it. They may try again at once, so it goes on to
the next meeting without failing.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CaptureError, SpmdMismatchError
from graphopt.ranks.processes import ended_ranks, is_registered, learn, register

_meetings: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()

logger = logging.getLogger("graphopt")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2
_SECONDS_BETWEEN_LOOKS = 0.5
# How long the rank that may host the store stays for the others to learn what was decided.
_LINGER_SECONDS = 5.0


@dataclass(frozen=True)
class Channel:
    """The keys in a store under which the ranks of one group meet for one purpose.

    Attributes:
        topic: the same text on all ranks, different for different purposes.
        timeout: seconds to wait for the other ranks.
    """

    group: dist.ProcessGroup
    topic: str
    timeout: float

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges values in a meeting of one round; see `Meeting.exchange`."""
        with Meeting(self) as meeting:
            return meeting.exchange(mine)


class Meeting:
    """One agreement of all ranks of a group, in rounds, through their store: a context manager, to
    be entered once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._group = channel.group
        self._rank, self._size = channel.group.rank(), channel.group.size()
        self._numbers = _meetings.setdefault(channel.group, Counter())
        self._round = 0
        self._failed = self._patient = False
        self._given_up_on: list[int] = []

    def __enter__(self) -> Meeting:
        with _store_errors(self._channel):
            self._store = _compat.default_store()
            register(self._store, self._group)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and not self._failed:
                refused = isinstance(error, CaptureError)
                self._give_up({"error": str(error) or type(error).__name__, "refused": refused})
            self._leave(held=error is None)
        except RuntimeError as gone:  # of the store: nobody is left to be told
            logger.debug("the store is gone at the end of a meeting: %s", gone)
        finally:
            self._numbers[self._channel.topic] += 1

    def exchange(self, mine: dict[str, Any], *, patient: bool = False) -> list[dict[str, Any]]:
        """Sends the JSON-like value `mine` to all ranks; returns every rank's value, by rank.

        Args:
            patient: wait for ranks as long as their processes live, for what takes some of them
                much longer than others. All ranks have to say the same.

        Raises:
            SpmdMismatchError: a rank did not come in time, has ended or has given up, or the store
                is gone; `refused` where it gave up on a `CaptureError`.
        """
        self._round += 1
        self._patient = patient
        with _store_errors(self._channel):
            verdict = self._come(mine)
            while self._is_late(verdict):
                self._numbers[self._channel.topic] += 1
                verdict = self._come(mine)
            everyone = self._everyone() if verdict["held"] else []
        if not verdict["held"]:
            self._failed = True
            self._given_up_on = verdict.get("missing", [])
            refused = bool(verdict.get("refused"))
            raise SpmdMismatchError(self._explanation(verdict), refused=refused)
        return everyone

    def _come(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Submits a value in this round; returns how the round was decided."""
        self._store.set(self._key(f"said/{self._rank}"), json.dumps(mine))
        if self._store.add(self._key("came"), 1) == self._size:
            self._decide({"held": True}, self._round)
        return self._wait()

    def _everyone(self) -> list[dict[str, Any]]:
        said = [self._key(f"said/{rank}") for rank in range(self._size)]
        return [json.loads(theirs) for theirs in self._store.multi_get(said)]

    def _is_late(self, verdict: dict[str, Any]) -> bool:
        """True if the other ranks gave up on this rank before it arrived."""
        return self._round == 1 and self._rank in verdict.get("missing", ())

    def _wait(self) -> dict[str, Any]:
        """Waits until this round is decided, or decides that it has failed."""
        key = self._key("verdict")
        now = start = look = time.monotonic()
        while not self._store.check([key]):
            if now >= look:
                look = now + _SECONDS_BETWEEN_LOOKS
                if ended := self._ended():
                    return self._decide({"missing": ended, "ended": True}, self._round)
            if not self._patient and now - start >= self._channel.timeout:
                return self._decide({"missing": self._missing()}, self._round)
            time.sleep(min(max(_SHORTEST_PAUSE, (now - start) / 10), _LONGEST_PAUSE))
            now = time.monotonic()
        return dict(json.loads(self._store.get(key)))

    def _decide(self, verdict: dict[str, Any], number: int) -> dict[str, Any]:
        """Decides a round unless it has been decided; returns the decision."""
        mine = {"held": False, "by": self._rank, "seconds": self._channel.timeout} | verdict
        key = self._key("verdict", number)
        return dict(json.loads(self._store.compare_set(key, "", json.dumps(mine))))

    def _give_up(self, mine: dict[str, Any]) -> None:
        """Tells the other ranks that this rank leaves the meeting, and why."""
        self._round = max(self._round, 1)
        verdict = self._decide(mine, self._round)
        while self._is_late(verdict):
            self._numbers[self._channel.topic] += 1
            verdict = self._decide(mine, self._round)
        if verdict["held"]:
            self._decide(mine, self._round + 1)

    def _leave(self, held: bool) -> None:
        """Ends the meeting; rank 0, which may host the store, leaves last and clears up."""
        if self._rank:
            self._store.set(self._key(f"left/{self._rank}", 0), "")
            return
        staying = {r for r in range(1, self._size) if is_registered(self._store, self._group, r)}
        staying -= set(self._given_up_on)
        deadline = time.monotonic() + _LINGER_SECONDS
        while staying := {rank for rank in staying if not self._has_left(rank)}:
            if time.monotonic() > deadline:
                return
            time.sleep(_SHORTEST_PAUSE)
        if held:
            self._clear_up()

    def _has_left(self, rank: int) -> bool:
        left = self._store.check([self._key(f"left/{rank}", 0)])
        return left or rank in ended_ranks(self._group)

    def _clear_up(self) -> None:
        """Removes the keys of a finished meeting from the store."""
        ranks = range(self._size)
        keys = [self._key(f"left/{rank}", 0) for rank in ranks]
        for number in range(1, self._round + 1):
            names = (*(f"said/{rank}" for rank in ranks), "came", "verdict")
            keys += [self._key(name, number) for name in names]
        for key in keys:
            self._store.delete_key(key)

    def _has_said(self, rank: int) -> bool:
        return self._store.check([self._key(f"said/{rank}")])

    def _missing(self) -> list[int]:
        """The ranks that have submitted nothing in this round."""
        return [rank for rank in range(self._size) if not self._has_said(rank)]

    def _ended(self) -> list[int]:
        """The ranks that have submitted nothing in this round and whose process has ended."""
        learn(self._store, self._group)
        return [rank for rank in ended_ranks(self._group) if not self._has_said(rank)]

    def _explanation(self, verdict: dict[str, Any]) -> str:
        by, missing, topic = verdict["by"], verdict.get("missing"), self._channel.topic
        if "error" in verdict:
            return (
                f"rank {by} could not capture the step, so rank {self._rank} does not run it"
                f" either.\n  rank {by} said:  {verdict['error']}"
            )
        if "ended" in verdict:
            return (
                f"the process of rank(s) {missing} has ended while rank {by} waited at {topic}\n"
                "  hint:  look at the output of that process"
            )
        return (
            f"rank {by} waited {verdict['seconds']:g} s for rank(s) {missing} at {topic}\n"
            "  hint:  every rank has to call the step equally often; look at the output of the"
            " missing ranks"
        )

    def _key(self, name: str, number: int | None = None) -> str:
        topic = self._channel.topic
        meeting = self._numbers[topic] + 1
        number = self._round if number is None else number
        return f"graphopt/{self._group.group_name}/{topic}/{meeting}/{number}/{name}"


@contextmanager
def _store_errors(channel: Channel) -> Iterator[None]:
    """While active, errors of the store become errors that name the missing or ended ranks."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # what stores raise; there is no group any more
        first = str(error).partition("\n")[0]
        raise SpmdMismatchError(
            f"rank {channel.group.rank()} cannot reach the store in which the ranks meet at"
            f" {channel.topic}: {first}\n"
            "  hint:  the rank that hosts the store, usually rank 0, has ended or destroyed the"
            " process group; look at its output"
        ) from error
