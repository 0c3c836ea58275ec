"""How graphs of one step that part at decisions go together: which is tried first."""

from __future__ import annotations

from collections.abc import Sequence

from graphopt.runtime.bound_step import BoundStep, Tries


def in_order(entries: Sequence[BoundStep], retried: Tries | None) -> list[BoundStep]:
    """The graphs of a step as a call tries them. Graphs of one branch stand where that of them
    stands which was used last: all ranks try the same branches, whatever graphs they have.

    Args:
        entries: those used last first.
        retried: of the branch that is tried before all others.
    """
    places: dict[Tries, int] = {}
    for entry in entries:
        places.setdefault(entry.tries, len(places))
    found = sorted(entries, key=lambda entry: (entry.tries is not retried, places[entry.tries]))
    for entry in reversed(found):
        if entry.agreed is not None:
            entry.agreed.likely = entry.uniform
    return found


def join_branch(entry: BoundStep, entries: Sequence[BoundStep]) -> None:
    """Let a new graph count as one of its branch, of which others hold for other arguments, or for
    other decisions that this rank takes alone: all ranks try the same branches."""
    for other in entries:
        together = entry.agreed is not None and other.agreed is entry.agreed
        if together and other.uniform == entry.uniform:
            entry.tries = other.tries
