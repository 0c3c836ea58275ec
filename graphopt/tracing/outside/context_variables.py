"""Context variables that a step reads and sets: their methods, which are not of Python code."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord


class ContextVariables:
    """Those of one trace."""

    def __init__(self, record: OutsideRecord) -> None:
        self._record = record
        self._held: dict[contextvars.ContextVar[Any], _Variable] = {}

    def method(
        self,
        name: str,
        variable: contextvars.ContextVar[Any],
        args: Sequence[Any],
        path: str,
        line: SourceLine,
    ) -> None:
        """The step calls a method of a variable."""
        held = self._held.setdefault(variable, _Variable(variable))
        if name == "set":
            held.own = True
            self._record.unrepeated.variables[variable] = path, line
        elif name == "reset" and args and held.is_original(args[0]):
            held.own = False
            self._record.unrepeated.variables.pop(variable, None)
        elif name == "get" and not held.own:
            self._record.read(OutsidePlace("attribute", held, "value"), f"{path}.get()", line)


class _Variable:
    """The value of a context variable, as an attribute. Kept by guards: no weak reference fits.

    Attributes:
        own: the step has set it, and not yet put back what was there.
    """

    __slots__ = ("_before", "_variable", "own")

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable, self._before, self.own = variable, variable.get(None), False

    @property
    def value(self) -> Any:
        return self._variable.get(None)

    def is_original(self, token: contextvars.Token[Any]) -> bool:
        """Whether `reset(token)` puts back what was there before the step."""
        return token.old_value is contextvars.Token.MISSING or token.old_value is self._before
