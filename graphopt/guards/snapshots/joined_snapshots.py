"""The snapshots of several guards as one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from graphopt.guards.snapshots.snapshot import StateSnapshot

_MOST_CHANGES = 3
"""The number of changes after which a guard is no longer joined with others."""


class HasSnapshot(Protocol):
    """A guard that offers a snapshot of its last successful check."""

    @property
    def unchanged(self) -> StateSnapshot | None:
        """A snapshot under which the guard holds, or None if it must be checked in detail."""


class JoinedSnapshots:
    """The snapshots of several guards joined into one, which is much faster to compare. Guards that
    change repeatedly are left out."""

    def __init__(self, guards: Sequence[HasSnapshot]) -> None:
        self._changes: dict[HasSnapshot, int] = dict.fromkeys(guards, 0)
        self._seen: dict[HasSnapshot, StateSnapshot] = {}
        self._joined: StateSnapshot | None = None

    def unchanged(self) -> Collection[HasSnapshot]:
        """Returns the guards known to hold; the others must be checked in detail."""
        if self._joined is None or not self._joined.holds():
            return ()
        return self._seen

    def note(self) -> None:
        """Records that all guards hold, and joins their snapshots for the next call."""
        for guard, before in self._seen.items():
            self._changes[guard] += guard.unchanged is not before
        self._seen = {
            guard: guard.unchanged
            for guard, changes in self._changes.items()
            if guard.unchanged is not None and changes <= _MOST_CHANGES
        }
        self._joined = StateSnapshot.joined(self._seen.values())
