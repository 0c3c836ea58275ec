"""Containers outside a step that one trace of it has changed."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.known_objects import KnownObjects
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.unrepeated import UnrepeatedChanges
from graphopt.tracing.refusals.host_work import HostWork

MUTABLE = frozenset({list, deque, set})
"""Containers whose items are compared, rather than looked at by their keys."""


@dataclass
class ChangedContainer:
    """A list, queue or set that the step has changed.

    Attributes:
        before: a copy of it as it was.
        line: that changes it first.
    """

    container: Any
    before: Any
    line: SourceLine

    @property
    def is_as_before(self) -> bool:
        """Whether there are the very items again that were there before."""
        now, before = self.container, self.before
        if isinstance(now, set):
            return set(map(id, now)) == set(map(id, before))
        return len(now) == len(before) and all(map(is_, now, before))

    def put_back(self) -> None:
        """Give it the items that it had."""
        self.container.clear()
        add = self.container.update if isinstance(self.container, set) else self.container.extend
        add(self.before)


class ContainerChanges(KnownObjects):
    """Follows what a step does to containers.

    Attributes:
        unrepeated: what it leaves changed in a way that is not followed.
        rewritten: arrays and the like that it has written to, and dictionaries whose keys it has
            taken out or moved, by id, and where.
        repeated: tables, by id, in which each call leaves what the step leaves there.
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
        self._touched: dict[int, Any] = {}

    def mutated(self, container: Any, line: SourceLine) -> None:
        """The step adds to or takes from a container."""
        key = id(container)
        if not self.is_outside(container):
            return
        self.unrepeated.note(container, self.path(container, type(container).__name__), line)
        if key not in self._mutated:
            self._mutated[key] = _copied(container)
            self._goes_through(container)
            if isinstance(container, (dict, set)):
                self._touched[key] = container
            if OutsidePlace("item", container).is_item:
                self._tables.append(container)
        if type(container) in MUTABLE:
            changed = ChangedContainer(container, self._mutated[key], line)
            self._changes.setdefault(key, changed)
        elif not isinstance(container, dict):
            self.rewritten[key] = container, line

    def refused_change(self, container: Any) -> CaptureError:
        """The refusal of a step that changes a list among its arguments."""
        _, line = self.unrepeated.written_at(container) or ("", None)
        return HostWork.CHANGE.error("a list among its arguments", str(line) if line else None)

    def changes_given(self, container: Any, line: SourceLine) -> None:
        """The step may be about to change a list among its arguments."""
        if id(container) in self.of_call:
            self.unrepeated.note(container, "a list", line)

    def reordered(self, table: dict[Any, Any], line: SourceLine) -> None:
        """The step takes keys out of a dictionary, or moves them."""
        if self.is_outside(table):
            self.rewritten[id(table)] = table, line

    def emptied(self, container: Any) -> None:
        """The step takes everything out of a container: what it puts there is its own."""
        if self.is_outside(container):
            self._emptied.add(id(container))

    def touched(self) -> list[Any]:
        """The dictionaries and sets to which the step has added."""
        return list(self._touched.values())

    def changed_containers(self) -> Iterator[ChangedContainer]:
        """Lists, queues and sets that the step has changed so far."""
        yield from self._changes.values()

    def take_changed(self) -> list[ChangedContainer]:
        """The same, of which nothing else remembers from then on what has been put there."""
        changed, self._changes = self._changes, {}
        return [each for key, each in changed.items() if key not in self.repeated]


def _copied(container: Any) -> Any:
    """A container with what is in it; of a class of the program's, a plain one."""
    known = type(container) in (*MUTABLE, dict, OrderedDict, defaultdict)
    kinds = () if known else (dict, list, set)
    kind = next((kind for kind in kinds if isinstance(container, kind)), copy.copy)
    return kind(container)
