"""Containers outside a step that its trace has changed."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_
from typing import Any

from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.known_objects import KnownObjects
from graphopt.tracing.outside.places import OutsidePlace, bytes_in, is_bytes
from graphopt.tracing.outside.unrepeated import UnrepeatedChanges, users
from graphopt.tracing.refusals.host_work import HostWork

PUT_BACK = 1 << 24
"""Bytes of an array that are compared, and put back after a trace. A step that reads all of a
larger one, or changes it, is refused before it does."""
MUTABLE = frozenset({list, deque, set})
"""Containers whose items are compared, rather than looked at by their keys."""


@dataclass
class ChangedContainer:
    """A list, queue or set outside the step that the step has changed.

    Attributes:
        before: a copy of it as it was.
        line: that changes it first.
    """

    container: Any
    before: Any
    line: SourceLine

    @property
    def is_as_before(self) -> bool:
        """True if the container holds the very items that it held before."""
        now, before = self.container, self.before
        if isinstance(now, set):
            return set(map(id, now)) == set(map(id, before))
        return len(now) == len(before) and all(map(is_, now, before))

    def put_back(self) -> None:
        """Restores the container's former items."""
        self.container.clear()
        add = self.container.update if isinstance(self.container, set) else self.container.extend
        add(self.before)


class ContainerChanges(KnownObjects):
    """Tracks the changes that a step makes to containers.

    Attributes:
        unrepeated: what it leaves changed in a way that is not followed.
        rewritten: arrays and the like that it has written to, and dictionaries whose keys it has
            taken out or moved, by id, and where.
        repeated: tables, by id, in which each call leaves what the step leaves there.
    """

    def __init__(self, own: Iterable[dict[str, Any]]) -> None:
        super().__init__(own)
        self.unrepeated = UnrepeatedChanges()
        self.rewritten: dict[int, tuple[Any, SourceLine]] = {}
        self._mutated: dict[int, Any] = {}
        self._tables: list[dict[Any, Any]] = []
        self._changes: dict[int, ChangedContainer] = {}
        self._emptied: set[int] = set()
        self.repeated: set[int] = set()

    def mutated(self, container: Any, line: SourceLine) -> None:
        """Records that the step adds items to a container or removes some."""
        key = id(container)
        if not self.is_outside(container):
            return
        path = self.path(container, type(container).__name__)
        if is_bytes(container) and bytes_in(container) > PUT_BACK:
            raise HostWork.CHANGE.refused(f"{path} outside its arguments", users(line))
        self.unrepeated.note(container, path, line)
        if key not in self._mutated:
            self._mutated[key] = _copied(container)
            if OutsidePlace("item", container).is_item:
                self._tables.append(container)
        if type(container) in MUTABLE:
            changed = ChangedContainer(container, self._mutated[key], line)
            self._changes.setdefault(key, changed)
        elif not isinstance(container, dict):
            self.rewritten[key] = container, line

    def refused_change(self, container: Any) -> CaptureError:
        """Builds the error for a step that changes a list among its arguments."""
        _, line = self.unrepeated.written_at(container) or ("", None)
        return HostWork.CHANGE.error("a list among its arguments", line)

    def changes_given(self, container: Any, line: SourceLine) -> None:
        """Records that the step may change a list among its arguments."""
        if id(container) in self.of_call:
            self.unrepeated.note(container, "a list", line)

    def reordered(self, table: dict[Any, Any], line: SourceLine) -> None:
        """Records that the step removes or moves keys of a dictionary."""
        if self.is_outside(table):
            self.rewritten[id(table)] = table, line

    def emptied(self, container: Any) -> None:
        """Records that the step empties a container, whose later items are the step's own."""
        if self.is_outside(container):
            self._emptied.add(id(container))


def _copied(container: Any) -> Any:
    """Copies a container; one of a user's class becomes a plain one."""
    known = type(container) in (*MUTABLE, dict, OrderedDict, defaultdict)
    kinds = () if known else (dict, list, set)
    kind = next((kind for kind in kinds if isinstance(container, kind)), copy.copy)
    return kind(container)
