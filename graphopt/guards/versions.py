"""The versions of many dictionaries, compared at once to see that nothing in them has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import compress
from operator import ne
from typing import Any

from graphopt import _compat

_MOST_CHANGES = 3
"""The number of changes after which a dictionary's version is no longer asked for."""


class Versions:
    """The versions of dictionaries under which their contents are known.

    A dictionary is left out once it changes again and again, such as the globals of a program that
    counts its steps in one of them, or is empty.

    Attributes:
        known: the versions, in order; None before anything is known.
    """

    def __init__(self, containers: Iterable[Any]) -> None:
        found = {id(container): container for container in containers}
        tables = {key: _compat.versioned_table(each) for key, each in found.items()}
        self._behind = {key: id(table) for key, table in tables.items() if table is not None}
        self._tables = list({id(t): t for t in tables.values() if t is not None}.values())
        self._told = set(map(id, self._tables))
        self._changes: Counter[int] = Counter()
        self.known: list[int] | None = None

    def now(self) -> list[int]:
        """Returns the present versions."""
        return list(map(_compat.table_version, self._tables))

    def tell_of(self, container: object) -> bool:
        """True if a container's version tells whether something in it has changed."""
        return self._behind.get(id(container)) in self._told

    def note(self, versions: list[int]) -> bool:
        """Records that the contents are right in these versions, of before they were looked at.

        Returns:
            Whether `tell_of` is no longer true of some container.
        """
        if self.known is not None:
            self._changes.update(map(id, compress(self._tables, map(ne, self.known, versions))))
        self.known = versions
        kept = [bool(t) and self._changes[id(t)] <= _MOST_CHANGES for t in self._tables]
        if all(kept):
            return False
        self._tables = list(compress(self._tables, kept))
        self.known = list(compress(versions, kept))
        self._told = set(map(id, self._tables))
        return True
