"""Optimizer state that a step's first call would create, made before the capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from graphopt.tracing.optimizers.optimizer_state import entries_at, write

_MISSING: Any = object()

Entries = list[tuple[dict[Any, Any], Any, str, Any]]
"""State of optimizers, with the parameters or other keys, the second keys and the values to put
there."""


@dataclass
class NewState:
    """State and attributes that the first call of a step creates, made in advance.

    Attributes:
        entries: optimizer state.
        attributes: values of attributes: where, name, value.
    """

    entries: Entries
    attributes: list[tuple[dict[str, Any], str, Any]]

    def __bool__(self) -> bool:
        return bool(self.entries or self.attributes)

    def put(self) -> None:
        """Stores the values in optimizers and objects."""
        for attributes, name, value in self.attributes:
            attributes[name] = value
        for table, parameter, key, value in self.entries:
            write(table, parameter, key, value)

    @contextmanager
    def present(self) -> Iterator[None]:
        """While active, optimizers and objects hold these values, as the second call finds them."""
        tables = {id(table): table for table, *_ in self.entries}.values()
        before = [
            (table, {of: set(entries_at(value)) for of, value in table.items()}) for table in tables
        ]
        attributes = [(of, name, of.get(name, _MISSING)) for of, name, _ in self.attributes]
        try:
            self.put()
            yield
        finally:
            for table, known in before:
                _forget(table, known)
            for of, name, value in attributes:
                if value is _MISSING:
                    del of[name]
                else:
                    of[name] = value


NO_STATE = NewState([], [])


def _forget(table: dict[Any, Any], known: dict[Any, set[str]]) -> None:
    for parameter in [parameter for parameter in table if parameter not in known]:
        del table[parameter]
    for parameter, keys in known.items():
        for key in entries_at(table[parameter]).keys() - keys:
            del table[parameter][key]
