"""Lists and dictionaries that a step makes, and gives to what is done in each call.

table[key] = row          each call makes a row anew
row.append(1)             and does not see that
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from graphopt.host.held import holds_same
from graphopt.tracing.nests import containers_within


class _Given:
    """One container, with a copy as it was given."""

    __slots__ = ("before", "container")

    def __init__(self, container: Any) -> None:
        self.container, self.before = container, container.copy()


class OwnContainers:
    """The containers that one trace has given away."""

    def __init__(self) -> None:
        self._given: list[_Given] = []
        self._inner: list[_Given] = []

    def add(self, values: Iterable[Any]) -> None:
        """The step gives these, or what is in them."""
        for value in values:
            containers = containers_within(value)
            own = containers[:1] if containers and containers[0] is value else []
            self._given += map(_Given, own)
            self._inner += map(_Given, containers[len(own) :])

    def are_alone(self) -> bool:
        """Whether the step, which is over, has left each as it was given, and holds none."""
        changed = not all(holds_same(e.container, e.before) for e in (*self._given, *self._inner))
        alone = all(sys.getrefcount(each.container) == _BY_ITSELF for each in self._given)
        self._given, self._inner = [], []
        return alone and not changed


_SAMPLE = _Given([])
_BY_ITSELF = sys.getrefcount(_SAMPLE.container)
"""References of a container that nothing else holds."""
