"""Guards on everything that a step read outside its arguments.

Asked before every call of a step, so the usual answer is a snapshot's, in C over all places of one
kind, of some tens of nanoseconds for each. Only where that finds another object are the places
looked at one by one, equal numbers told from others, and the path of a change is named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch

from graphopt.guards.modules import ModuleGuards
from graphopt.guards.snapshots.outside_places import prepared
from graphopt.guards.snapshots.snapshot import StateSnapshot
from graphopt.tracing.outside.held import CONTAINERS, GuardedObject, GuardedPlace, only_within
from graphopt.tracing.outside.places import (
    LEADING,
    MISSING,
    OutsidePlace,
    OutsideRead,
    is_value,
    same,
)
from graphopt.tracing.outside.record import OutsideRecord


class OutsideGuard:
    """A guard on the reads in a record. It keeps neither the objects nor their owners alive; if one
    is gone that no place leads to, it never fits again.

    Args:
        changed: objects outside in which the graph changes something: the same in each call.

    Attributes:
        given: positions of objects among the arguments in whose place others may be.
        modules: that have to be the same.
    """

    def __init__(self, record: OutsideRecord, changed: Iterable[Any] = ()) -> None:
        self._gone: str | None = None
        self._entries: list[GuardedPlace] = []
        self._followed: set[GuardedObject] = set()
        self._places: StateSnapshot | None = None
        entries = _Entries(record, _telling(self, OutsideGuard.lost))
        self._entries = entries.found
        self._changed = {entries.held(each).root for each in changed}
        self._given = record.given
        self.given = tuple(e.key for e in self._entries if e.holder.get() is record.given)
        self._followed = {entry.held for entry in self._entries if entry.held is not None}
        modules = self._unfollowed(record)
        self._owners = [
            weakref.ref(module, _telling(self, partial(_drop, f"{name} is gone")))
            for name, module in modules
        ]
        self.modules = ModuleGuards(
            (name, each, _assigned(record, each), record.taken_from(vars(each)))
            for name, each in modules
        )
        self._places = prepared(self._entries)
        self._given.clear()

    def _unfollowed(self, record: OutsideRecord) -> list[tuple[str, torch.nn.Module]]:
        """Returns the guarded modules that no equal module may replace."""
        modules = [module for _, module in record.modules.values()]
        within: set[int] = set()
        self._described: list[tuple[str, GuardedObject]] = []
        for held in self._followed:
            if held.description is None:
                continue
            found = only_within(held.get(), modules)
            held.followed = found is not None
            if found is not None and id(held.get()) in record.modules:
                within.update(found)
                self._described.append((record.modules[id(held.get())][0], held))
        return [each for key, each in record.modules.items() if key not in within]

    @property
    def alive(self) -> bool:
        """True if the guard may fit again."""
        return self._gone is None

    @property
    def unchanged(self) -> StateSnapshot | None:
        """The snapshot of the last check, without `modules`. None after a change, and if the
        objects vary from call to call."""
        return None if self.given or self._described else self._places

    def tensors(self, given: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Yields the tensors that the step found, except its arguments `given`."""
        own = {id(self._given), *map(id, given)}
        for entry in self._entries:
            value = None if entry.held is None else entry.held.get()
            if isinstance(value, torch.Tensor) and id(entry.holder.root.get()) not in own:
                yield value

    def mismatches(self, leaves: Sequence[Any]) -> Iterator[str]:
        """Yields descriptions of changes: the path, both values, and the line that read it.

        Args:
            leaves: the arguments of the call.
        """
        if self._gone is not None:
            yield self._gone
            return
        self._given.update((position, leaves[position]) for position in self.given)
        try:
            yield from self._mismatches()
        finally:
            self._given.clear()

    def _mismatches(self) -> Iterator[str]:
        yield from self.modules.mismatches()
        yield from (f"{name} changed" for name, held in self._described if held.is_changed())
        if self._places is not None and self._places.holds():
            return
        following = _Following()
        change = next(filter(None, map(following.change, self._entries)), None)
        change = change or following.meeting(self._changed)
        if change is not None:
            yield change
            return
        following.settle(self._entries)  # equal values in other objects are looked for from now on
        self._places = prepared(self._entries)

    def lost(self, held: GuardedObject) -> None:
        """Records that a guarded object was freed; one found at the same place may replace it."""
        if held in self._followed and held.followed:
            self._let_go()
            for each in self._followed:
                each.release()
            return
        path = next((e for e in self._entries if held in (e.holder, e.holder.owner)), None)
        if path is not None:
            line = f"{path.line.file}:{path.line.line}"
            self.drop(f"the object of {path.path} is gone, read at {line}")
        self._let_go()

    def _let_go(self) -> None:
        """Drops all references that keep guarded objects alive."""
        if self._places is not None:
            self._places.forget()
            self._places = None

    def drop(self, reason: str) -> None:
        """Releases all objects for good."""
        self._gone = reason
        self._let_go()
        self._entries, self._owners, self._described = [], [], []
        self._changed = set()
        self._followed.clear()
        self.modules.forget()


def _drop(reason: str, guard: OutsideGuard, gone: Any) -> None:
    guard.drop(reason)


def _telling(
    guard: OutsideGuard, act: Callable[[OutsideGuard, Any], None]
) -> Callable[[Any], None]:
    """Makes a function that tells a guard of what is gone, as long as the guard itself is there."""
    reference = weakref.ref(guard)

    def told(gone: Any) -> None:
        guard = reference()
        if guard is not None and guard.alive:
            act(guard, gone)

    return told


class _Entries:
    """Builds a guard's entries from a record, with one holder for each object."""

    def __init__(self, record: OutsideRecord, gone: Callable[[GuardedObject], None]) -> None:
        self._record, self._gone = record, gone
        self._objects: dict[int, GuardedObject] = {}
        reads = [(read, _settled(read)) for read in record.reads.values()]
        stand_ins = {id(read.value) for read, settled in reads if settled.value is not read.value}
        found = [
            self._entry(settled)
            for read, settled in reads
            if id(read.place.holder) not in stand_ins
        ]
        # The other arguments have guards of their own.
        self.found = [
            each
            for each in found
            if each.holder.get() is not record.given
            or each.key in record.given.opened
            or (each.held and each.held.followed)
        ]

    def _entry(self, read: OutsideRead) -> GuardedPlace:
        held = None
        if read.place.kind in LEADING and not is_value(read.value) and read.value is not MISSING:
            held = self.held(read.value)
        return GuardedPlace(read, self.held(read.place.holder), held)

    def held(self, value: Any) -> GuardedObject:
        if id(value) not in self._objects:
            owner = self._record.owner(value)
            self._objects[id(value)] = GuardedObject(
                value,
                self._gone,
                None if owner is None else self.held(owner),
                self._record.is_pinned(value),
            )
        return self._objects[id(value)]


class _Following:
    """Reads every guarded place again, in order, and finds the objects that replaced former
    ones."""

    def __init__(self) -> None:
        self._found: dict[GuardedObject, Any] = {}
        self._values: list[Any] = []

    def change(self, entry: GuardedPlace) -> str | None:
        """Describes what changed at a place, or returns None."""
        holder = self._object(entry.holder)
        line = f"{entry.line.file}:{entry.line.line}"
        if holder is MISSING:
            return f"the object of {entry.path} is gone, read at {line}"
        now = OutsidePlace(entry.kind, holder, entry.key).now()
        self._values.append(now)
        if same(now, entry.value) if entry.held is None else self._is(entry.held, now):
            return None
        return f"{entry.path}: {shown(entry.expected())} -> {shown(now)}, read at {line}"

    def meeting(self, changed: Set[GuardedObject]) -> str | None:
        """Describes two guarded objects that became one while the step changes one of them, or
        returns None.

        Args:
            changed: objects in whose places it does; containers need not be among them.
        """
        seen: dict[int, GuardedObject] = {}
        for held in changed:
            self._object(held)
        for held, value in self._found.items():
            if held.owner is not None or value is MISSING:
                continue
            other = seen.setdefault(id(value), held)
            if other is not held and (type(value) in CONTAINERS or changed & {held, other}):
                return f"a {type(value).__name__} read in two places was two objects before"
        return None

    def settle(self, entries: Sequence[GuardedPlace]) -> None:
        """Makes the objects found the guarded ones, and the values found the expected ones."""
        for held, value in self._found.items():
            if held.owner is None and held.get() is not value:
                held.take(value)
        for entry, value in zip(entries, self._values, strict=True):
            entry.found(value)

    def _object(self, held: GuardedObject) -> Any:
        if held not in self._found:
            owner = held.owner
            self._found[held] = held.get() if owner is None else held.within(self._object(owner))
        return self._found[held]

    def _is(self, held: GuardedObject, now: Any) -> bool:
        now = held.within_wrapper(now)
        if held in self._found or held.owner is not None:
            return self._object(held) is now
        fits = now is held.get() or held.may_become(now)
        if fits:
            self._found[held] = now
        return fits


def _settled(read: OutsideRead) -> OutsideRead:
    """Replaces a tracing stand-in by the function that it stands for."""
    if callable(read.value):
        return read._replace(value=read.place.now())
    return read


def _assigned(record: OutsideRecord, module: torch.nn.Module) -> set[str]:
    return {key for key in vars(module) if record.has_written(vars(module), key)}


def shown(value: Any) -> str:
    """Formats a value for messages."""
    if value is MISSING:
        return "nothing"
    text = repr(value) if is_value(value) else f"<{type(value).__name__}>"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and not is_value(value):
        text = name
    return text if len(text) <= 60 else f"{text[:57]}..."
