"""Changes outside a step that a trace makes and no later call of the graph would repeat.

A trace finds everything as the one before it has left it. So what the second one changes again, the
step changes in each call, and not once, as a cache is filled: such a step is refused.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

from graphopt import _compat
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line, frames, is_library_file
from graphopt.tracing.outside.places import OutsidePlace


class UnrepeatedChanges:
    """Collects the changes that later calls would not repeat.

    Attributes:
        first: what is changed first, as a message calls it, and where.
        at_once: one trace is enough to refuse it.
        once: no other trace changes that again.
        remembering: the code of functions with caches (`functools.lru_cache`) that the step calls.
        variables: context variables that the step has set and not set back, with where.
        left: places in which it leaves plain values that each call may put there, with their paths.
    """

    def __init__(self) -> None:
        self.first: tuple[str, SourceLine | None] | None = None
        self.at_once = False
        self.once = False
        self.remembering: set[types.CodeType] = set()
        self.variables: dict[Any, tuple[str, SourceLine]] = {}
        self.left: list[tuple[str, OutsidePlace]] = []
        self._lines: dict[int, tuple[str, SourceLine]] = {}
        self._locks: dict[int, tuple[Any, bool, str, SourceLine]] = {}

    def add(self, what: str, line: SourceLine | None) -> None:
        """Records a change that each eager call would make again."""
        self.first = self.first or (what, line and users(line))

    def refuse(self, what: str, line: SourceLine | None) -> None:
        """Records an unrepeated change that cannot be undone for a second trace."""
        self.add(what, line)
        self.at_once = True

    def note(self, holder: Any, path: str, line: SourceLine) -> None:
        """Records that the step writes to an object."""
        if self.remembering and self._is_remembered():
            self.refuse(path, line)
            self.once = True
        elif self._is_in_mode():
            self.refuse(path, line)
        if id(holder) not in self._lines:
            self._lines[id(holder)] = path, users(line)

    def remembers(self, function: Any) -> None:
        """Records that the step calls a function with a cache."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            self.remembering.add(code)

    def _is_in_mode(self) -> bool:
        """True if a torch mode of the program is running, which sees other calls in a graph."""
        return any(map(_compat.runs_mode, frames(sys._getframe(1))))

    def _is_remembered(self) -> bool:
        """True inside a function whose result is cached, so that it runs once although its changes
        are restored."""
        return any(frame.f_code in self.remembering for frame in frames(sys._getframe(1)))

    def written_at(self, holder: Any) -> tuple[str, SourceLine] | None:
        """The path and source line of an object's first write, or None."""
        return self._lines.get(id(holder))

    def locks(self, lock: Any, path: str, line: SourceLine) -> None:
        """Records that the step acquires a lock, which it may release."""
        self._locks.setdefault(id(lock), (lock, lock.locked(), path, users(line)))

    def finish(self) -> None:
        """Ends the step: looks for locks and variables that it left changed."""
        for lock, taken, path, line in self._locks.values():
            if lock.locked() and not taken:
                lock.release()
                self.refuse(path, line)
        for what, line in self.variables.values():
            self.add(what, line)
        self._locks.clear()
        self.variables.clear()


def users(line: SourceLine) -> SourceLine:
    """The user's line that runs: the caller's, for a line of the standard library."""
    return (current_user_line() or line) if is_library_file(line.file) else line
