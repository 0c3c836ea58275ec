"""Outside reads that follow a host callback, which may change what they find.

graphopt.callback(check, loss)      a function that is called when the graph runs
if self.stop: …                     eager code reads here what it has put there
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from graphopt.ir.source import SourceLine

_KINDS = frozenset({"item", "attribute", "cell", "class", "has", "size", "length", "keys", "whole"})
_PROGRAM = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.CodeType,
    property,
    staticmethod,
    classmethod,
    type,
)
"""Parts of the program, which nobody changes as it runs."""


ReadPlace = tuple[Any, str, SourceLine]
"""A place that the step reads, with its path for messages and the source line."""


class ReadsBehindCallbacks:
    """The outside reads of one trace after its first host callback.

    Args:
        times_written: how often the step has written to each place so far.
    """

    def __init__(self, times_written: Counter[tuple[Any, ...]]) -> None:
        self._times_written = times_written
        self._read: list[dict[Hashable, ReadPlace]] = []
        self._before: list[dict[Any, int]] = []

    def calls(self) -> None:
        """Records that the step calls a host callback."""
        self._read.append({})
        self._before.append(dict(self._times_written))

    def reads(self, place: Any, value: Any, path: str, line: SourceLine) -> None:
        """Records that the step reads a place."""
        if isinstance(value, _PROGRAM) or place.kind not in _KINDS:
            return
        identity = place.identity
        since = self._last_written(identity)
        for number in range(len(self._read) - 1, since - 1, -1):
            if identity in self._read[number]:
                return
            self._read[number][identity] = place, path, line

    def _last_written(self, identity: Any) -> int:
        """The number of the first callback after the step's last write to a place."""
        times = self._times_written.get(identity, 0)
        number = len(self._before)
        while number and self._before[number - 1].get(identity, 0) == times:
            number -= 1
        return number

    def call(self, number: int) -> Iterator[ReadPlace]:
        """Yields the reads that follow a callback, before any write by the step."""
        yield from self._read[number].values()
