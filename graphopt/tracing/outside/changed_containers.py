"""Containers outside a step that one trace of it has changed."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.host.changes import MUTABLE, ChangeByMethod
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.known_objects import KnownObjects
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.unrepeated import Unrepeated

_TAKING_FIRST = (
    ChangeByMethod("pop", (0,), takes=False),
    ChangeByMethod("__delitem__", (0,), takes=False),
    ChangeByMethod("popleft", (), takes=False),
)


@dataclass
class ChangedContainer:
    """What the step has changed in a list, queue or set, one after the other.

    Attributes:
        before: a copy of it as it was.
        changes: in order, each with its value.
        line: that makes the first.
        otherwise: it has changed it in another way as well, which cannot be done again.
    """

    container: Any
    before: Any
    changes: list[tuple[ChangeByMethod, Any]]
    line: SourceLine
    otherwise: bool = False


class ContainerChanges(KnownObjects):
    """Follows what a step does to containers.

    Attributes:
        unrepeated: what it leaves changed in a way that is not followed.
        rewritten: arrays and the like that it has written to, and dictionaries whose keys it has
            taken out or moved, by id, and where.
    """

    def __init__(self, own: Iterable[dict[str, Any]]) -> None:
        super().__init__(own)
        self.unrepeated = Unrepeated()
        self.rewritten: dict[int, tuple[Any, SourceLine]] = {}
        self._mutated: dict[int, Any] = {}
        self._tables: list[dict[Any, Any]] = []
        self._changes: dict[int, ChangedContainer] = {}
        self._emptied: set[int] = set()
        self._items_set: set[int] = set()
        self._touched: dict[int, Any] = {}

    def mutated(
        self,
        container: Any,
        line: SourceLine,
        changes: Sequence[tuple[ChangeByMethod, Any]] | None = None,
    ) -> None:
        """The step adds to or takes from a container.

        Args:
            changes: that it makes, each with its value, if these are all and can be made again.
        """
        if not self.is_outside(container) or self.unrepeated.is_of_others():
            return
        key = id(container)
        self.unrepeated.note(container, self.path(container, type(container).__name__), line)
        if key not in self._mutated:
            self._mutated[key] = _copied(container)
            self._goes_through(container)
            if isinstance(container, (dict, set)):
                self._touched[key] = container
            if OutsidePlace("item", container).is_item:
                self._tables.append(container)
        if type(container) not in MUTABLE:
            if not isinstance(container, dict):
                self.rewritten[key] = container, line
            return
        new = ChangedContainer(container, self._mutated[key], [], line)
        known = self._changes.setdefault(key, new)
        if changes is None:
            known.otherwise = True
        else:
            known.changes.extend(changes)

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

    def is_changed_by_items(self, container: Any) -> bool:
        """Whether the length of a list is what it was before, and so many more or less as it is in
        this trace."""
        changed = self._changes.get(id(container))
        if changed is None:
            return True
        return not changed.otherwise and all(how.is_of_one_item for how, _ in changed.changes)

    def is_counted_past(self, container: Any, key: Any) -> bool:
        """Whether an item of a list or a queue that the step has changed is another one where the
        list was longer or shorter before: any but those it has put in front."""
        changed = self._changes.get(id(container))
        if changed is None or isinstance(container, set):
            return False
        in_front = all(
            how.method == "appendleft" or (how.method == "insert" and how.before == (0,))
            for how, _ in changed.changes
        )
        return changed.otherwise or not in_front or not 0 <= key < len(changed.changes)

    def rest(self, container: Any) -> tuple[Any, int, list[Any]] | None:
        """A list or a queue as it was before, how many items the step has taken from its front, or
        that have made room for others, and what it has added at its end; None where it has done
        anything else with it."""
        if type(container) not in (list, deque):
            return None
        changed, room = self._changes.get(id(container)), getattr(container, "maxlen", None)
        if id(container) in self._items_set:
            return None
        if changed is None:
            return None if id(container) in self._mutated else (container, 0, [])
        if changed.otherwise:
            return None
        taken, added = 0, []
        for change, value in changed.changes:
            if change.method == "append":
                added.append(value)
                full = room is not None and len(changed.before) - taken + len(added) > room
                taken += int(full)
            elif change in _TAKING_FIRST:
                taken += 1
            else:
                return None
        return (changed.before, taken, added) if taken <= len(changed.before) else None

    def replaces(self, container: Any, key: Any, value: Any) -> bool:
        """The step puts an item into a list. Returns whether that takes the place of a None that
        it has appended: each call appends the item."""
        rest = self.rest(container)
        if type(container) is not list or type(key) is not int or rest is None:
            return False
        found, taken, added = rest
        index = key - (len(found) - taken if key >= 0 else -len(added))
        if not 0 <= index < len(added):
            return False
        changes = self._changes[id(container)].changes
        appended = [at for at, (change, _) in enumerate(changes) if change.method == "append"]
        change, before = changes[appended[index]]
        if before is not None:
            return False
        changes[appended[index]] = change, value
        return True

    def kept(self, container: Any) -> tuple[Any, list[tuple[ChangeByMethod, Any]]] | None:
        """A list or a queue as it was before, and what the step has done to it; None where that
        cannot be done again."""
        changed = self._changes.get(id(container))
        if changed is None or changed.otherwise or id(container) in self._items_set:
            return None
        return changed.before, list(changed.changes)

    def puts_into(self, container: Any, key: Any) -> None:
        """The step puts something in the place of an item. Each call does so before it changes the
        list: an item that is another one by then is none that each call finds."""
        self._items_set.add(id(container))
        changed = self._changes.get(id(container))
        if changed is None or not changed.changes:
            return
        appends = type(container) is list and all(
            how.method == "append" for how, _ in changed.changes
        )
        if not appends or type(key) is not int or key < 0:
            changed.otherwise = True

    def has_set_item(self, container: Any) -> bool:
        """Whether the step has put something in the place of an item of a list."""
        return id(container) in self._items_set

    def additions(self, container: Any) -> int:
        """How many items the step has put into a container."""
        changed = self._changes.get(id(container))
        return 0 if changed is None else sum(how.is_addition for how, _ in changed.changes)

    def changed_containers(self) -> Iterator[ChangedContainer]:
        """Lists, queues and sets that the step has changed so far by what can be done again."""
        yield from (each for each in self._changes.values() if not each.otherwise)


def _copied(container: Any) -> Any:
    """A container with what is in it; of a class of the program's, a plain one."""
    known = type(container) in (*MUTABLE, dict, OrderedDict, defaultdict)
    kinds = () if known else (dict, list, set)
    kind = next((kind for kind in kinds if isinstance(container, kind)), copy.copy)
    return kind(container)
