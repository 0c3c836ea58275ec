"""Objects that are compared by what they are, not by what is in them."""

from __future__ import annotations

from typing import Any


class Itself:
    """An object, equal to itself alone; kept alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
