"""The record of one trace: the outside places that it read and wrote."""

from __future__ import annotations

import copy
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain
from typing import Any, NamedTuple

import torch

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.changed_containers import MUTABLE
from graphopt.tracing.outside.places import (
    MISSING,
    OutsidePlace,
    OutsideRead,
    attributes_of,
    key_text,
    same,
)
from graphopt.tracing.outside.reads import OutsideReads, of_none
from graphopt.tracing.outside.unrepeated import users


class WrittenPlace(NamedTuple):
    """An outside place that the step wrote.

    Attributes:
        before: what was there.
        owner: the object that has it as an attribute; None where it is none of these.
        path: how a message calls the place.
        line: which writes there first.
    """

    place: OutsidePlace
    before: Any
    owner: Any
    path: str
    line: SourceLine | None = None

    @property
    def location(self) -> str | None:
        """The source line of the write, as text."""
        return None if self.line is None else str(self.line)


class OutsideRecord(OutsideReads):
    """The outside reads and writes of one trace.

    A place that the step has written is its own from then on.

    Args:
        own: dictionaries that have guards of their own: attributes of modules and optimizers.

    Attributes:
        times_written: how often the step has written to a place, by its identity.
        optimizers: whose state the step uses, by id.
        changed_at: the line that changes what the step has read, if it does that.
        left_over: ids of those whose state also holds that of parameters in none of their groups.
    """

    def __init__(
        self,
        own: Iterable[dict[str, Any]],
        inputs: Set[Any] = frozenset(),
        told: Set[Any] = frozenset(),
    ) -> None:
        super().__init__(own, inputs)
        self._told = told
        self._places: dict[tuple[Any, ...], WrittenPlace] = {}
        self.optimizers: dict[int, Any] = {}
        self.left_over: frozenset[int] = frozenset()
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.functions_of_torch: set[types.CodeType] = set()
        self.changed: tuple[OutsideRead, Any] | None = None
        self.changed_at: str | None = None
        self.times_written: Counter[tuple[Any, ...]] = Counter()
        self._left_in: dict[int, Any] = {}

    def finish(self) -> None:
        """Ends the trace: looks for what the step changed."""
        self.unrepeated.finish()
        self.changed = self._changed()
        if self.changed is not None:
            self.changed_at = self.location_of(self.changed[0].place)
        self._hold_replaced()
        for identity, (container, line) in self.rewritten.items():
            self.holds_contents(container, line, self._left_in.get(identity))
        self._forget_values()

    def _hold_replaced(self) -> None:
        """Guards objects that the step found in module attributes and replaces there, which the
        modules' own guards skip."""
        found = {identity: self._own_reads[identity] for identity in self._replaced_own()}
        self.reads = {**found, **self.reads}  # what is in them is found by them
        self._own_reads.clear()

    def _replaced_own(self) -> Iterator[tuple[Any, ...]]:
        return (identity for identity in self._own_reads if identity in self._written)

    def replaced_own(self) -> Iterator[WrittenPlace]:
        """Yields module attributes in which the step found an object or container and leaves
        another."""
        for read in map(self._own_reads.__getitem__, self._replaced_own()):
            yield WrittenPlace(read.place, read.value, None, read.path, read.line)

    def close(self) -> None:
        """Drops nearly everything, which only observation needs."""
        self._paths.clear()
        self._forget_values()
        self.optimizers.clear()

    def _forget_values(self) -> None:
        """Drops former values of written places."""
        self._places.clear()
        self._mutated.clear()
        self._tables.clear()
        self._changes.clear()
        self.rewritten.clear()
        self._left_in.clear()
        self.reads_array = of_none
        self.groups, self.real_groups = {}, {}

    def wrote(
        self,
        place: OutsidePlace,
        owner: Any = None,
        path: str | None = None,
        line: SourceLine | None = None,
    ) -> None:
        """Records a write to a place; `owner` is the object whose attribute it is."""
        identity = place.identity
        if self._is_its_own(place):
            self.mutated(place.holder, line or SourceLine("", 0, ""))
            return
        if line is not None:
            line = users(line)
            self.unrepeated.note(place.holder, path or self._path_of(place, owner), line)
        self.times_written[identity] += 1
        if not isinstance(owner, types.ModuleType) and attributes_of(owner) is place.holder:
            self.owned(place.holder, owner)
        if place.is_written and identity not in self._places:
            path = path or self._path_of(place, owner)
            read = self.reads.get(identity)
            before = MISSING if read is not None and read.value is MISSING else place.now()
            self._places[identity] = WrittenPlace(self._outside(place), before, owner, path, line)
        if type(place.holder) in MUTABLE:
            self._mutated.setdefault(id(place.holder), copy.copy(place.holder))
        self._written.add(identity)

    def _is_its_own(self, place: OutsidePlace) -> bool:
        """True if a place is an item that the step itself has put into a list."""
        before = self._mutated.get(id(place.holder))
        if place.kind != "item" or not isinstance(before, (list, deque)):
            return False
        return type(place.key) is int and place.key >= len(before)

    def holds(self, place: OutsidePlace, value: Any, path: str, line: SourceLine | None) -> None:
        """Guards a value that the step leaves in a place and no later call stores: it must be there
        already."""
        if place.identity not in self.reads and not self.is_own(place.holder):
            line = line or SourceLine("", 0, "")
            self.reads[place.identity] = self._made(place, value, path, line)

    def note_left_in(self) -> None:
        """Stores the contents of rewritten containers at the end of the step."""
        containers = (container for container, _ in self.rewritten.values())
        self._left_in = {id(each): _contents(each).now() for each in containers}

    def holds_contents(self, container: Any, line: SourceLine, left: Any = None) -> None:
        """Guards a container's contents (a dictionary's keys) as `holds` does for one value.

        Args:
            left: what the step has left in it; None: what is there.
        """
        path, place = self.path(container, type(container).__name__), _contents(container)
        self.holds(place, place.now() if left is None else left, path, line)

    def refuse_changed(self, puts_back: Callable[[Any], bool]) -> None:
        """Records a refusal for each container outside that the step leaves with other items.

            history.append(loss.item())      would happen at capture only
            stack.append(x); stack.pop()     leaves the very items that were there before

        Args:
            puts_back: whether an object is as it was when the trace is over. One that other threads
                may be changing is not.
        """
        for container, line in self.rewritten.values():
            if not puts_back(container):
                self.unrepeated.refuse(self.path(container, type(container).__name__), line)
        for each in self._changes.values():
            if id(each.container) in self.repeated:
                continue
            known = self.unrepeated.written_at(each.container)
            assert known is not None, "noted when it was changed"
            if each.is_as_before:
                self.holds_contents(each.container, each.line)  # of another it may leave less
            elif puts_back(each.container):
                self.unrepeated.add(*known)
            else:
                each.put_back()
                self.unrepeated.refuse(*known)

    def _path_of(self, place: OutsidePlace, owner: Any) -> str:
        if owner is None or (place.kind == "item" and not isinstance(place.key, str)):
            holder = place.holder
            return f"{self.path(holder, type(holder).__name__)}[{key_text(place.key)}]"
        return f"{self.path(owner, type(owner).__name__)}.{place.key}"

    def written_places(self) -> Iterator[WrittenPlace]:
        """Yields the written places other than attributes of modules and optimizers, also those
        that native methods wrote (`dict.update`)."""
        yield from (each for each in self._places.values() if not self.is_own(each.place.holder))
        for table in self._tables:
            before, path = self._mutated[id(table)], self.path(table, "dict")
            for key, value in list(table.items()):
                place, was = OutsidePlace("item", table, key), before.get(key, MISSING)
                if was is not value and place.identity not in self._places:
                    known = self.unrepeated.written_at(table)
                    line, text = known and known[1], f"{path}[{key_text(key)}]"
                    yield WrittenPlace(self._outside(place), was, None, text, line)

    def is_changed(self, container: Any) -> bool:
        """True if the step has written to a container."""
        written = any(each.place.holder is container for each in self._places.values())
        return written or id(container) in self._mutated

    def is_input(self, place: OutsidePlace) -> bool:
        """True if the number in a place is an input of the graph."""
        return place.identity in self._inputs

    def goes_by_keys(self, table: dict[Any, Any]) -> bool:
        """True if the step has read a dictionary's keys or items, or some are graph inputs."""
        if OutsidePlace("keys", table).identity in self.reads:
            return True
        places = (OutsidePlace(kind, table, key) for key in table for kind in ("item", "has"))
        return any(self.is_input(each) or each.identity in self.reads for each in places)

    def is_told(self, place: OutsidePlace) -> bool:
        """True if the step is known to read a place and to change its value."""
        return place.identity in self._told

    def depends_on(self, place: OutsidePlace) -> bool:
        """True if the step has used the former value of a place, or that there was none."""
        identity, holder = place.identity, id(place.holder)
        if identity in self.reads:
            return True
        written = self._places.get(identity)
        if written is None or written.before is not MISSING:
            return False
        asked = [("has", holder, place.key), ("keys", holder, None), ("size", holder, None)]
        return any(each in self.reads for each in asked)

    def places_of(self, value: Any) -> list[OutsidePlace]:
        """All places in which the step has read an object."""
        reads = chain(self.reads.values(), map(self._own_reads.__getitem__, self._replaced_own()))
        return [read.place for read in reads if read.value is value]

    def is_written(self, place: OutsidePlace) -> bool:
        return place.identity in self._written

    def location_of(self, place: OutsidePlace) -> str | None:
        """The source line that first writes to a place, as text."""
        written = self._places.get(place.identity)
        return None if written is None else written.location

    def taken_from(self, table: dict[str, Any]) -> set[str]:
        """The keys of a dictionary whose numbers are inputs of the graph."""
        return {key for key in table if OutsidePlace("item", table, key).identity in self._inputs}

    def has_written(self, table: dict[str, Any], key: str) -> bool:
        """True if the step wrote to an item of a dictionary."""
        return OutsidePlace("item", table, key).identity in self._written

    def _changed(self) -> tuple[OutsideRead, Any] | None:
        """The first place that the step has read and then changed, with its present value."""
        for identity, read in list(self.reads.items()):
            now = read.place.now()
            if same(now, read.value) or id(read.place.holder) in self.repeated:
                continue
            if read.value is MISSING and self.is_namespace(read.place.holder):
                self.reads[identity] = read._replace(value=now)  # a package has imported it
                continue
            return read, now
        return None


def _contents(container: Any) -> OutsidePlace:
    return OutsidePlace("keys" if isinstance(container, dict) else "whole", container)
