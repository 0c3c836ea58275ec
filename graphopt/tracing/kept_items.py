"""What stands in a trace for texts, and what gives the items of a list that the step changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from graphopt.host.changes import ChangeByMethod
from graphopt.tracing.later import Later
from graphopt.tracing.later_values import is_later
from graphopt.tracing.outside.places import FollowedPlace
from graphopt.tracing.running_trace import current_trace


class PieceOfText(str):
    """A text that stands for a value."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        format("", spec)  # which raises an exception where it is none for texts
        return current_trace().text(Later(format, (self, spec))) if spec else str(self)

    def __repr__(self) -> str:
        return current_trace().text(Later(repr, (self,)))

    def __str__(self) -> str:
        return self


def as_piece(text: str) -> str:
    """A text that stands for a value as one that knows that; any other text itself."""
    return PieceOfText(text) if is_later(text) else text


class PieceOfOutside(PieceOfText):
    """A text outside the step, which functions without Python code may look up or compare."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(current_trace().exact(self))

    def __bool__(self) -> bool:
        return bool(current_trace().exact(self))


def _compared(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(str, name)
    return lambda one, other: compare(current_trace().exact(one), current_trace().exact(other))


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(PieceOfOutside, _name, _compared(_name))


class KeptItems:
    """Gives the items of a list or a queue, as a step finds it in a call and has changed it so far.

    Args:
        changes: made so far, in order.
        last: how many of the last items are wanted; None: all.

    Attributes:
        within: where each call finds the container; None where it is the same one in each call.
    """

    hands_on = True

    def __init__(
        self, container: Any, changes: Sequence[ChangeByMethod], last: int | None = None
    ) -> None:
        self.container, self.changes, self.last = container, tuple(changes), last
        self.within: FollowedPlace | None = None
        self.__name__ = "items"

    def __call__(self, *values: Any) -> Any:
        return self.of(self.container if self.within is None else self.within.now(), values)

    def of(self, container: Any, values: Sequence[Any]) -> Any:
        """The items, given what was there before the step."""
        items = copy.copy(container) if self.last is None else container[-self.last :]
        given = iter(values)
        for change in self.changes:
            change.make(items, next(given) if change.takes else None)
        return items if self.last is None else items[-self.last :]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptItems) or self.container is not other.container:
            return False
        return (self.changes, self.last) == (other.changes, other.last)

    def __hash__(self) -> int:
        return hash((id(self.container), self.last))
