"""What a step finds in a list or a queue outside, and has appended to it by then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Population:
    """A list or a queue as a step finds it in a call, and has appended to it.

    Args:
        container: the list itself.
        taken: how many items the step has taken from its front, of a queue without a bound.
        added: how many it has appended.

    Attributes:
        before: the list as it was, while the trace has changed it; else None.
    """

    def __init__(self, container: Any, taken: int, added: int, before: Any) -> None:
        self.container, self._taken, self._added = container, taken, added
        self._bound: int | None = getattr(container, "maxlen", None)
        self.before = before

    def _items(self) -> Any:
        return self.container if self.before is None else self.before

    def _gone(self) -> int:
        """How many of the items that were there are there no longer."""
        if self._bound is None:
            return self._taken
        return max(0, len(self._items()) + self._added - self._bound)

    def positions(self) -> range:
        """Those of all items."""
        return range(len(self._items()) - self._gone() + self._added)

    def new(self, position: int) -> int:
        """Which of the items appended one is; -1 for one that was there before."""
        behind: int = self.positions()[position] - len(self._items()) + self._gone()
        return max(-1, behind)

    def same(self, one: int, other: int) -> bool:
        """Whether two positions are one."""
        return self.positions()[one] == self.positions()[other]

    def item(self, position: int) -> Any:
        """The item that was there before; any of these where it is a new one."""
        if self.new(position) < 0:
            return self._items()[self.positions()[position] + self._gone()]
        return self._items()[-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Population) or self.container is not other.container:
            return False
        return (self._taken, self._added) == (other._taken, other._added)

    def __hash__(self) -> int:
        return hash((id(self.container), self._taken, self._added))


@dataclass(frozen=True)
class Asks:
    """Calls a method of a population."""

    population: Population
    method: str

    @property
    def __name__(self) -> str:
        return "an item of a list"

    def __call__(self, *args: int) -> Any:
        return getattr(self.population, self.method)(*args)
