"""What one trace of a step leaves changed outside in a way that no later call repeats.

A trace finds everything as the one before it has left it. So what the second one changes again, the
step changes in each call, and not once, as a cache is filled: such a step is refused.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any, NamedTuple

from graphopt import _compat
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line, frames, is_library_file
from graphopt.tracing.outside.places import OutsidePlace


class LeftPlace(NamedTuple):
    """A place in which a trace leaves another value.

    Attributes:
        path: as a message calls it.
        may_be_told: the value is a plain one, which each call may put there.
    """

    path: str
    place: OutsidePlace
    line: SourceLine | None
    may_be_told: bool


class UnrepeatedChanges:
    """Notes such changes.

    Attributes:
        first: what is changed first, as a message calls it, and where.
        at_once: one trace is enough to refuse it.
        once: no other trace changes that again.
        remembering: the code of functions with caches (`functools.lru_cache`) that the step calls.
        variables: context variables that the step has set and not set back, with where.
        left: places in which it leaves values that none of the traces has made for each call.
    """

    def __init__(self) -> None:
        self.first: tuple[str, SourceLine | None] | None = None
        self.at_once = False
        self.once = False
        self.remembering: set[types.CodeType] = set()
        self.variables: dict[Any, tuple[str, SourceLine]] = {}
        self.left: list[LeftPlace] = []
        self._lines: dict[int, tuple[str, SourceLine]] = {}
        self._locks: dict[int, tuple[Any, bool, str, SourceLine]] = {}
        self._arrays: dict[int, tuple[Any, Any, str, SourceLine]] = {}

    def add(self, what: str, line: SourceLine | None) -> None:
        """The step leaves something changed that it would change again."""
        self.first = self.first or (what, line and users(line))

    def refuse(self, what: str, line: SourceLine | None) -> None:
        """The same of what a trace does not put back, so that it cannot be traced a second time."""
        self.add(what, line)
        self.at_once = True

    def note(self, holder: Any, path: str, line: SourceLine) -> None:
        """The step writes to an object."""
        if self.remembering and self._is_remembered():
            self.refuse(path, line)
            self.once = True
        elif self._is_in_mode():
            self.refuse(path, line)
        if id(holder) not in self._lines:
            self._lines[id(holder)] = path, users(line)

    def remembers(self, function: Any) -> None:
        """The step calls a function with a cache."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            self.remembering.add(code)

    def _is_in_mode(self) -> bool:
        """Whether a mode does this, which a graph shows other calls than its trace."""
        return any(map(_compat.runs_mode, frames(sys._getframe(1))))

    def _is_remembered(self) -> bool:
        """Whether this happens within a function that runs once, and whose cache stays filled when
        what it has changed is put back."""
        return any(frame.f_code in self.remembering for frame in frames(sys._getframe(1)))

    def written_at(self, holder: Any) -> tuple[str, SourceLine] | None:
        """How the step got to an object that it has written to, and the line."""
        return self._lines.get(id(holder))

    def locks(self, lock: Any, path: str, line: SourceLine) -> None:
        """The step takes a lock, which it may give back."""
        self._locks.setdefault(id(lock), (lock, lock.locked(), path, users(line)))

    def watches(self, array: Any, path: str, line: SourceLine) -> None:
        """The step does to a large array, which is not put back, what cannot be seen."""
        if id(array) not in self._arrays:
            self._arrays[id(array)] = (array, array.copy(), path, users(line))

    def finish(self) -> None:
        """The step is over."""
        for lock, taken, path, line in self._locks.values():
            if lock.locked() and not taken:
                lock.release()
                self.refuse(path, line)
        for array, before, path, line in self._arrays.values():
            if array.tobytes() != before.tobytes():
                array[...] = before
                self.refuse(path, line)
        for what, line in self.variables.values():
            self.add(what, line)
        self._locks.clear()
        self._arrays.clear()
        self.variables.clear()


def users(line: SourceLine) -> SourceLine:
    """A line of the user's: of the standard library's, the one that calls it."""
    return (current_user_line() or line) if is_library_file(line.file) else line
