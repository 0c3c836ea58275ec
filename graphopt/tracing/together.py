"""Guards that are looked at together while nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from graphopt.tracing.snapshot import StateSnapshot

_MOST_CHANGES = 3
"""Snapshots of one guard that are joined to those of others before it is left to itself."""


class HasSnapshot(Protocol):
    """A guard that knows what there was when it was looked at last."""

    @property
    def unchanged(self) -> StateSnapshot | None:
        """It holds where this does; None where it has to be looked at."""


class Together:
    """The snapshots of several guards as one, which takes a fraction of the time of one after
    another. Guards that see changes again and again are not among them."""

    def __init__(self, guards: Sequence[HasSnapshot]) -> None:
        self._changes: dict[HasSnapshot, int] = dict.fromkeys(guards, 0)
        self._seen: dict[HasSnapshot, StateSnapshot] = {}
        self._joined: StateSnapshot | None = None

    def unchanged(self) -> Collection[HasSnapshot]:
        """Guards that hold, as far as that is known; others have to be looked at."""
        if self._joined is None or not self._joined.holds():
            return ()
        return self._seen

    def note(self) -> None:
        """All guards have been looked at, and hold: what they have seen is looked at together from
        now on."""
        for guard, before in self._seen.items():
            self._changes[guard] += guard.unchanged is not before
        self._seen = {
            guard: guard.unchanged
            for guard, changes in self._changes.items()
            if guard.unchanged is not None and changes <= _MOST_CHANGES
        }
        self._joined = StateSnapshot.joined(self._seen.values())
