"""The places outside a step that one trace of it read, with what was there."""

from __future__ import annotations

import copy
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import count
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host.changes import MUTABLE
from graphopt.ir.source import SourceLine
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.behind import Behind
from graphopt.tracing.outside.changed_containers import ChangedContainer, ContainerChanges
from graphopt.tracing.outside.loads import Load, Loads, Store
from graphopt.tracing.outside.places import (
    MISSING,
    OutsidePlace,
    Read,
    bytes_in,
    is_bytes,
    is_read,
    key_text,
    same,
)
from graphopt.tracing.outside.unrepeated import users

_SINGLY = 1000
"""The items of larger containers are guarded together."""
_AT_MOST = 100_000
_BYTES_AT_MOST = 1 << 24
"""Larger ones are refused, where a step reads all that is in them."""
_TABLES = (dict, types.MappingProxyType)
_SEVERAL = (tuple, frozenset)


class WrittenPlace(NamedTuple):
    """A place that the step wrote to.

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


class Record(ContainerChanges):
    """What one trace read outside, and what it wrote there.

    A place that the step has written is its own from then on. A value that only goes into the next
    value of its own place (`self.n += 1`) is not read; but whoever reads that next value reads the
    outside one, and the step has changed it.

    Args:
        own: dictionaries that have guards of their own: attributes of modules and optimizers.

    Attributes:
        refused: why no later call could do what it does to a container.
        times_written: how often the step has written to a place, by its identity.
        loads: what it has loaded to count with; read unless it is stored where it comes from.
        length_of: the length of a list, where that is an input of the graph; else None.
        behind: what it reads behind calls of functions on the host; None before the first.
    """

    def __init__(
        self,
        own: Iterable[dict[str, Any]],
        inputs: Set[Any] = frozenset(),
        told: Set[Any] = frozenset(),
    ) -> None:
        super().__init__(own)
        self._inputs, self._told = inputs, told
        self.refused: CaptureError | None = None
        self._written: set[tuple[Any, ...]] = set()
        self._derived: set[tuple[Any, ...]] = set()
        self._counted: set[tuple[Any, ...]] = set()
        self._begun: dict[tuple[Any, ...], Load] = {}
        self._places: dict[tuple[Any, ...], WrittenPlace] = {}
        self.reads: dict[tuple[Any, ...], Read] = {}
        self.optimizers: dict[int, Any] = {}
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.functions_of_torch: set[types.CodeType] = set()
        self.changed: tuple[Read, Any] | None = None
        self.counted: Read | None = None
        self.asked_type: SourceLine | None = None
        self.advanced: tuple[str, SourceLine] | None = None
        self.pending: list[Load] | None = None
        self.loads = Loads()
        self.times_written: Counter[tuple[Any, ...]] = Counter()
        self.behind: Behind | None = None
        self.length_of: Callable[[Any], Any] = _of_none
        self._left_in: dict[int, Any] = {}
        self._gone_over: set[int] = set()

    def finish(self) -> None:
        """The step is over: look for what it changed."""
        self._settle_trimmed()
        self.unrepeated.finish()
        self.changed = self._changed()
        for identity, (container, line) in self.rewritten.items():
            self.holds_contents(container, line, self._left_in.get(identity))
        self._forget_values()

    def close(self) -> None:
        """Let go of what only observing needs, which is nearly everything."""
        self._existing.let_go()
        self._paths.clear()
        self._forget_values()
        self.optimizers.clear()

    def _forget_values(self) -> None:
        """Let go of what was in places that the step has written."""
        self._places.clear()
        self._mutated.clear()
        self._tables.clear()
        self.loads.take_all()
        self._changes.clear()
        self.rewritten.clear()
        self._left_in.clear()
        self._begun.clear()
        self.length_of = _of_none

    # ------------------------------------------------------------------ reads

    def read(self, place: OutsidePlace, path: str, line: SourceLine) -> Any:
        """The step reads a place. Returns what is there."""
        value = place.now()
        identity = place.identity
        if self.behind is not None:
            self.behind.reads(place, value, path, line)
        if self.pending is not None:
            self.pending.append((place, path, line))
            return value
        if identity in self._inputs and (identity in self._written or _is_symbolic(value)):
            return value
        if self.is_own(place.holder):
            self.reached(value, path)
            return value
        if identity in self._derived and not self._begins_in(identity):
            self.counted = self.counted or self._made(place, value, path, line)
        if identity in self._written or id(place.holder) in self._emptied:
            return value
        if _is_stand_in(value):
            return value
        if id(place.holder) in self._mutated and identity not in self.reads:
            self._read_before(place, value, path, line)
            return value
        if self._begins_in(identity):
            return value  # which the step has put there, or a default dictionary
        if value is not MISSING:
            self.reached(value, path)
        if identity not in self.reads:
            self.reads[identity] = self._made(place, value, path, line)
            if isinstance(value, torch.Tensor):
                self.read(OutsidePlace("kind", value), path, line)
            elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
                self.contents(value, path, line)
        return value

    def _begins_in(self, identity: tuple[Any, ...]) -> bool:
        """Whether the graph holds where nothing is in a place."""
        return identity in self.reads and self.reads[identity].value is MISSING

    def _read_before(self, place: OutsidePlace, value: Any, path: str, line: SourceLine) -> None:
        """What the step makes of a container depends on what the container held before."""
        before = OutsidePlace(place.kind, self._mutated[id(place.holder)], place.key).now()
        if before is value:
            self.reached(value, path)
        self.reads[place.identity] = self._made(place, before, path, line)

    def contents(
        self, container: Any, path: str, line: SourceLine, nested: bool = True, within: Any = ()
    ) -> None:
        """The step reads all that a container holds.

        Args:
            nested: of containers within it as well.
            within: containers that this one is in, by id.
        """
        if not self.is_outside(container) or id(container) in within:
            return
        self._goes_through(container)
        if is_bytes(container):
            self._reads_bytes(container, path, line)
            return
        items = self._items_of(container, path, line)
        if not nested:
            return
        within = {*within, id(container)}
        for key, value in items:
            if is_read(value):
                inner = f"{path}[{key_text(key)}]"
                self.reached(value, inner)
                self.contents(value, inner, line, within=within)

    def _items_of(self, container: Any, path: str, line: SourceLine) -> list[tuple[Any, Any]]:
        """Read the items of a container; of a large one, all at once."""
        if isinstance(container, (dict, types.MappingProxyType)):
            self.read(OutsidePlace("keys", container), f"the keys of {path}", line)
            keys: Iterable[Any] | None = list(container)
        elif isinstance(container, (list, tuple)):
            self._gone_over.add(id(container))
            self.size(container, path, line)
            keys = range(len(container))
        else:
            keys = None
        if keys is not None and len(container) <= _SINGLY:
            return [(key, self.item(container, key, path, line)) for key in keys]
        if not isinstance(container, tuple):
            self._reads_whole(container, path, line)
        values = container.values() if isinstance(container, _TABLES) else container
        return list(zip(count() if keys is None else keys, values, strict=False))

    def _reads_whole(self, container: Any, path: str, line: SourceLine) -> None:
        if len(container) > _AT_MOST:
            self._refuse_large(f"{len(container):,} items", path, line)
        else:
            self.read(OutsidePlace("whole", container), path, line)

    def _reads_bytes(self, container: Any, path: str, line: SourceLine) -> None:
        flags = getattr(container, "flags", None)
        if flags is not None and not flags.writeable:
            return
        if bytes_in(container) > _BYTES_AT_MOST:
            self._refuse_large(f"{bytes_in(container) >> 20} MB", path, line)
        else:
            self.read(OutsidePlace("whole", container), path, line)

    def _refuse_large(self, size: str, path: str, line: SourceLine) -> None:
        """What it costs to look in each call whether anything has changed is more than a step."""
        self.refused = self.refused or CaptureError(
            f"it reads all of {path}, {size} outside its arguments",
            location=str(users(line)),
            hint="make it a tensor of the model (register_buffer), or what cannot change: a tuple,"
            " an array with flags.writeable = False; or read it outside the step",
        )

    def item(self, container: Any, key: Any, path: str, line: SourceLine) -> Any:
        """The step reads one item of an outside container."""
        if isinstance(container, list) and isinstance(key, int) and key < 0:
            self.size(container, path, line)
            key += len(container)
        self.looks_up(container, key, line)
        return self.read(OutsidePlace("item", container, key), f"{path}[{key_text(key)}]", line)

    def size(self, container: Any, path: str, line: SourceLine) -> None:
        self._goes_through(container)
        length = self.length_of(container)
        if length is not None:
            self.reads_behind(container, path, line)
            if is_host_number(length):
                length.exactly()
        elif not isinstance(container, (tuple, str, bytes)):
            self.read(OutsidePlace("size", container), f"len({path})", line)

    def asks_length(self, container: Any, path: str, line: SourceLine) -> Any:
        """The step asks how long a container is. Returns the length, where the graph takes it."""
        length = self.length_of(container)
        if length is None:
            self.size(container, path, line)
        else:
            self.reads_behind(container, path, line)
        return length

    def reads_behind(self, container: Any, path: str, line: SourceLine) -> None:
        """The step reads what the graph takes of a container: where a function on the host has been
        called, it is not to change it."""
        if self.behind is not None:
            self.behind.reads(OutsidePlace("whole", container), None, path, line)

    def changed_lengths(self) -> Iterator[tuple[str, OutsidePlace]]:
        """Lengths of lists and queues that the step changes by single items, and what it computes
        of them (`kept_lists`), where it reads nothing else of them."""
        for each in self._changes.values():
            reads = [r for r in self.reads.values() if r.place.holder is each.container]
            if isinstance(each.container, set) or not self.is_changed_by_items(each.container):
                continue
            if id(each.container) in self._gone_over:
                continue
            if all(read.place.kind in _OF_LISTS or _is_of_number(read) for read in reads):
                yield from ((r.path, r.place) for r in reads if r.value is not MISSING)

    def read_loaded(self, store: Store, place: OutsidePlace | None = None) -> bool:
        """A value is stored: read what it was made of, other than what was in `place` itself.

        Returns:
            Whether it was made of that.
        """
        loads = [self._of_item(each, place) for each in self.loads.take(store)]
        others = [each for each in loads if place is None or each[0].identity != place.identity]
        self._read_each(others)
        own = [each for each in loads if each not in others]
        if own:
            self._begun.setdefault(own[0][0].identity, own[0])
        return bool(own)

    def _of_item(self, load: Load, place: OutsidePlace | None) -> Load:
        """A load of an item counted from the end, where the step stores into that very item."""
        found, path, line = load
        if place is None or found.kind != "last" or found.holder is not place.holder:
            return load
        index = len(found.holder) - found.key[0]
        if place.key not in (index, -found.key[0]):
            return load
        self.size(found.holder, path, line)
        return OutsidePlace("item", found.holder, index), path, line

    def read_container(self, frame: int, container: Any) -> None:
        """The step changes a container in place, which it has loaded and puts back: each call has
        to find this one there."""
        for place in self.loads.places(frame):
            if place.now() is container:
                self._read_each(self.loads.take_of(place.identity))

    def read_left(self) -> None:
        """Read what has been loaded and not been stored."""
        self._read_each(self.loads.take_all())

    def _read_each(self, loads: list[Load]) -> None:
        for each in loads:
            self.read(*each)

    # ------------------------------------------------------------------ writes

    def wrote(
        self,
        place: OutsidePlace,
        counting: bool,
        owner: Any = None,
        path: str | None = None,
        line: SourceLine | None = None,
    ) -> None:
        """The step writes to a place, `counting` if what it makes of the value there; `owner` is
        the object that has it as an attribute."""
        identity = place.identity
        if self.unrepeated.is_of_others():
            return
        if self._is_its_own(place):
            self.mutated(place.holder, line or SourceLine("", 0, ""))
            return
        if line is not None:
            line = users(line)
            self.unrepeated.note(place.holder, path or self._path_of(place, owner), line)
        self._read_each(self.loads.take_of(identity))  # it is what was there before
        if counting and identity not in self._written and place.now() is MISSING:
            counting = False  # it counts from what its class, or the module, has for the name
            if identity in self._begun:
                self.read(*self._begun[identity])
        self.times_written[identity] += 1
        self._goes_through(place.holder)
        if place.is_written and identity not in self._places:
            path = path or self._path_of(place, owner)
            read = self.reads.get(identity)
            before = MISSING if read is not None and read.value is MISSING else place.now()
            self._places[identity] = WrittenPlace(self._outside(place), before, owner, path, line)
        if type(place.holder) in MUTABLE:
            self._mutated.setdefault(id(place.holder), copy.copy(place.holder))
        if counting and (identity not in self._written or identity in self._derived):
            self._derived.add(identity)
            self._counted.add(identity)
        else:
            self._derived.discard(identity)
        self._written.add(identity)

    def _is_its_own(self, place: OutsidePlace) -> bool:
        """Whether a place is an item of a list that the step has put there itself."""
        before = self._mutated.get(id(place.holder))
        if place.kind != "item" or not isinstance(before, (list, deque)):
            return False
        return type(place.key) is int and place.key >= len(before)

    def holds(self, place: OutsidePlace, value: Any, path: str, line: SourceLine | None) -> None:
        """The step leaves a value in a place, which no later call puts there: it has to be there
        already."""
        if place.identity not in self.reads and not self.is_own(place.holder):
            line = line or SourceLine("", 0, "")
            self.reads[place.identity] = self._made(place, value, path, line)

    def note_left_in(self) -> None:
        """The step is at its end: what is in containers that it has written anew is still there."""
        containers = (container for container, _ in self.rewritten.values())
        self._left_in = {id(each): _contents(each).now() for each in containers}

    def holds_contents(self, container: Any, line: SourceLine, left: Any = None) -> None:
        """The same of all that is in a container; of a dictionary, of its keys.

        Args:
            left: what the step has left in it; None: what is there.
        """
        path, place = self.path(container, type(container).__name__), _contents(container)
        self.holds(place, place.now() if left is None else left, path, line)

    def iterator(self, iterator: Any, path: str, line: SourceLine) -> None:
        """The step takes values from an iterator, which are gone then."""
        if self.is_outside(iterator) and self.advanced is None:
            self.advanced = (path, line)

    def _path_of(self, place: OutsidePlace, owner: Any) -> str:
        if owner is None or (place.kind == "item" and not isinstance(place.key, str)):
            holder = place.holder
            return f"{self.path(holder, type(holder).__name__)}[{key_text(place.key)}]"
        return f"{self.path(owner, type(owner).__name__)}.{place.key}"

    def written_places(self) -> Iterator[WrittenPlace]:
        """The places that the step wrote to, other than attributes of modules and optimizers, also
        by functions without Python code (`dict.update`)."""
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
        """Whether the step has written to a container."""
        written = any(each.place.holder is container for each in self._places.values())
        return written or id(container) in self._mutated

    def is_used(self, container: Any) -> bool:
        """Whether the step has read a container, or given it to code that is not observed."""
        read = any(each.place.holder is container for each in self.reads.values())
        return read or self.is_pinned(container) or self.is_changed(container)

    def is_input(self, place: OutsidePlace) -> bool:
        """Whether the graph takes the number in a place."""
        return place.identity in self._inputs

    def is_told(self, place: OutsidePlace) -> bool:
        """Whether the step is known to read a place, and to change what is there."""
        return place.identity in self._told

    def depends_on(self, place: OutsidePlace) -> bool:
        """Whether the step has used what was in a place, be it to count; or that nothing was."""
        identity, holder = place.identity, id(place.holder)
        if identity in self.reads or identity in self._counted:
            return True
        written = self._places.get(identity)
        if written is None or written.before is not MISSING:
            return False
        asked = [("has", holder, place.key), ("keys", holder, None), ("size", holder, None)]
        return any(each in self.reads for each in asked)

    def counts_in(self, place: OutsidePlace) -> bool:
        """Whether the step has used what was in a place to count, and for nothing else."""
        return place.identity in self._counted

    def begins(self, place: OutsidePlace, number: Any) -> None:
        """The step adds tensors to a number that it finds in a place: the graph holds for this
        number, and there is a tensor in later calls."""
        found = self._begun.get(place.identity)
        if found is not None and place.identity not in self.reads:
            _, path, line = found
            self.reads[place.identity] = self._made(place, number, path, line)
        if self.counted is not None and self.counted.place.identity == place.identity:
            self.counted = None

    def take_changed(self) -> Iterator[ChangedContainer]:
        """Lists, queues and sets that the step has changed, and neither read nor replaced; those
        that it has changed otherwise than by what can be done again have no changes.
        Nothing else remembers what it has put there from then on."""
        read = {
            id(each.place.holder)
            for each in self.reads.values()
            if not (each.value is MISSING and isinstance(each.place.holder, (list, deque)))
        }
        read |= {
            id(each.value) for each in self.reads.values() if each.place.now() is not each.value
        }
        changed, self._changes = self._changes, {}
        for key, each in changed.items():
            if each.otherwise:
                each.changes.clear()
            if key not in read:
                yield each

    def places_of(self, value: Any) -> list[OutsidePlace]:
        """All places in which the step has read an object."""
        return [read.place for read in self.reads.values() if read.value is value]

    def taken_from(self, table: dict[str, Any]) -> set[str]:
        """The keys of a dictionary whose numbers the graph takes."""
        return {key for key in table if OutsidePlace("item", table, key).identity in self._inputs}

    def has_written(self, table: dict[str, Any], key: str) -> bool:
        """Whether the step wrote to an item of a dictionary."""
        return OutsidePlace("item", table, key).identity in self._written

    def _settle_trimmed(self) -> None:
        """Containers that were added to, and in whose place is a part of them now: another may be
        there the next time, if nothing else was done with them."""
        used = {id(read.place.holder) for read in self.reads.values()} | set(self._pinned)
        for identity, read in self.reads.items():
            now, key = read.place.now(), id(read.value)
            trimmed = identity in self._derived and key in self._mutated and key not in used
            if trimmed and type(now) is type(read.value):
                self.reads[identity] = read._replace(value=now)

    def _changed(self) -> tuple[Read, Any] | None:
        """A place that the step has read, and then changed, and what is there now."""
        for read in self.reads.values():
            now = read.place.now()
            if not same(now, read.value):
                return read, now
        return None

    def _made(self, place: OutsidePlace, value: Any, path: str, line: SourceLine) -> Read:
        if self.stands_for and place.kind in ("keys", "whole") and isinstance(value, _SEVERAL):
            value = type(value)(map(self._original, value))
        return Read(self._outside(place), value, path, line)


_OF_LISTS = frozenset({"size", "sum", "min", "max", "last"})
"""What is computed of a list, and known to a graph as a number."""


def _is_of_number(read: Read) -> bool:
    """Whether an item of a list is read that is a number, or that is not there."""
    is_item = read.place.kind == "item" and type(read.place.key) is int
    return is_item and (read.value is MISSING or type(read.value) in (int, float))


def _contents(container: Any) -> OutsidePlace:
    return OutsidePlace("keys" if isinstance(container, dict) else "whole", container)


def _of_none(container: Any) -> None:
    """The lengths that a graph takes which takes none."""


def _is_stand_in(value: Any) -> bool:
    """Whether a value stands for an input of the graph, or is a tuple of such."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_stand_in, value))
    return _compat.is_fake(value) or is_host_number(value)


def _is_symbolic(value: Any) -> bool:
    """Whether a value is a number of the trace, or a tuple of such."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_symbolic, value))
    return isinstance(value, SYMBOLIC)
