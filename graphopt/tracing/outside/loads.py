"""Values that the step has loaded, and that are on their way to a store."""

from __future__ import annotations

from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.places import OutsidePlace

Load = tuple[OutsidePlace, str, SourceLine]
"""A place whose value the step loads, how the program gets there, and the line."""
Store = tuple[int, int]
"""A frame, by its id, and the offset of an instruction in it."""


class PendingLoads:
    """What is loaded for one store alone, and not yet stored."""

    def __init__(self) -> None:
        self._loads: dict[Store, list[Load]] = {}

    def add(self, store: Store, load: Load) -> None:
        self._loads.setdefault(store, []).append(load)

    def places(self, frame: int) -> list[OutsidePlace]:
        """Where the values come from that are on their way in a frame."""
        waiting = [loads for store, loads in self._loads.items() if store[0] == frame]
        return [place for loads in waiting for place, _, _ in loads]

    def take(self, store: Store) -> list[Load]:
        """The loads for a store, which is about to be executed."""
        return self._loads.pop(store, [])

    def take_of(self, identity: tuple[Any, ...]) -> list[Load]:
        """The loads from one place."""
        taken = []
        for store, loads in self._loads.items():
            taken += [load for load in loads if load[0].identity == identity]
            self._loads[store] = [load for load in loads if load[0].identity != identity]
        return taken

    def take_all(self) -> list[Load]:
        """The loads that have not reached their stores, which exceptions may have prevented."""
        taken = [load for loads in self._loads.values() for load in loads]
        self._loads.clear()
        return taken
