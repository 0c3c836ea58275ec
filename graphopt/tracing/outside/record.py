"""What one trace of a step read outside, and what it wrote there."""

from __future__ import annotations

import copy
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from typing import Any, NamedTuple

import torch

from graphopt.host.changes import MUTABLE, ChangeByMethod, is_changed_to
from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.accesses import OutsideAccess
from graphopt.tracing.outside.changed_containers import ChangedContainer
from graphopt.tracing.outside.places import (
    MISSING,
    OutsidePlace,
    Read,
    attributes_of,
    key_text,
    same,
)
from graphopt.tracing.outside.reads import OutsideReads, is_stand_in, of_none
from graphopt.tracing.outside.unrepeated import users


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

    @property
    def location(self) -> str | None:
        """The line as a message says it."""
        return None if self.line is None else str(self.line)


class Record(OutsideReads):
    """What one trace read outside, and what it wrote there.

    A place that the step has written is its own from then on. A value that only goes into the next
    value of its own place (`self.n += 1`) is not read; but whoever reads that next value reads the
    outside one, and the step has changed it.

    Args:
        own: dictionaries that have guards of their own: attributes of modules and optimizers.

    Attributes:
        repeated: tables, by id, in which each call leaves what the step leaves there.
        times_written: how often the step has written to a place, by its identity.
        optimizers: whose state the step uses, by id.
        optimizers_read: ids of those whose parameter groups it reads.
        left_over: ids of those whose state also holds that of parameters in none of their groups.
        not_followed: what it has changed and read, where each call does not do that for itself.
        shown_on: the files on which it would show something when it began.
        kept_items: what gives the items of the lists of which something is computed later.
        executed: the instructions that may have read or written outside, by id.
        exact_lengths: places of lengths, by their identities, that are to be no inputs.
    """

    def __init__(
        self,
        own: Iterable[dict[str, Any]],
        inputs: Set[Any] = frozenset(),
        told: Set[Any] = frozenset(),
    ) -> None:
        super().__init__(own, inputs)
        self._told = told
        self._counted: set[tuple[Any, ...]] = set()
        self._places: dict[tuple[Any, ...], WrittenPlace] = {}
        self.optimizers: dict[int, Any] = {}
        self.optimizers_read: set[int] = set()
        self.left_over: frozenset[int] = frozenset()
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.functions_of_torch: set[types.CodeType] = set()
        self.changed: tuple[Read, Any] | None = None
        self.repeated: set[int] = set()
        self.times_written: Counter[tuple[Any, ...]] = Counter()
        self._left_in: dict[int, Any] = {}
        self.not_followed: list[ChangedContainer] = []
        self.shown_on = sys.stdout, sys.stderr
        self.kept_items: list[Any] = []
        self.executed: dict[int, OutsideAccess] = {}
        self.exact_lengths: set[tuple[Any, ...]] = set()
        self._put_anew: set[int] = set()

    def finish(self) -> None:
        """The step is over: look for what it changed."""
        self.texts.finish()
        self._forget_contents(self.laters.arrays)
        self.unrepeated.finish()
        self.changed = self._changed()
        self._hold_replaced()
        for identity, (container, line) in self.rewritten.items():
            self.holds_contents(container, line, self._left_in.get(identity))
        self._forget_values()

    def _hold_replaced(self) -> None:
        """Objects and containers that the step has found in attributes of modules, and in whose
        place it leaves others, which the guards of the modules pass over."""
        found = {identity: self._own_reads[identity] for identity in self._replaced_own()}
        self.reads = {**found, **self.reads}  # what is in them is found by them
        self._own_reads.clear()

    def _replaced_own(self) -> Iterator[tuple[Any, ...]]:
        return (identity for identity in self._own_reads if identity in self._written)

    def replaced_own(self) -> Iterator[WrittenPlace]:
        """Attributes of modules in which the step has found an object or a container, and in whose
        place it leaves another one."""
        for read in map(self._own_reads.__getitem__, self._replaced_own()):
            yield WrittenPlace(read.place, read.value, None, read.path, read.line)

    def _forget_contents(self, arrays: Any) -> None:
        """Arrays that each call writes to by itself may hold anything when it begins."""
        for identity, read in list(self.reads.items()):
            if arrays.is_written(read.place.holder):
                del self.reads[identity]

    def close(self) -> None:
        """Let go of what only observing needs, which is nearly everything."""
        self.texts.put_back()
        self._paths.clear()
        self._forget_values()
        self.optimizers.clear()

    def mutated(self, container: Any, *how: Any) -> None:
        self.texts.changes(container)
        super().mutated(container, *how)

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
        self.length_of = self.reads_array = of_none
        self.groups, self.real_groups = {}, {}
        self.laters = self.whole_calls = self.files = None

    def note_rearranged(self) -> None:
        """The step is at its end: where it goes by the tensors in a list or a queue, and changes
        it, it has put into each position what is there now, and has added or taken away the rest.
        """
        for each in list(self._changes.values()):
            if id(each.container) not in self.repeated and self._goes_by_tensors(each):
                size = OutsidePlace("size", each.container)
                if self.is_asked(each.container):
                    self.exact_lengths.add(size.identity)
                else:
                    self._puts_anew(each)

    def _goes_by_tensors(self, changed: ChangedContainer) -> bool:
        """Whether the step has read items of a short list or queue that holds tensors alone."""
        container, before = changed.container, changed.before
        if type(container) is set or max(len(container), len(before)) > _FOLLOWED_SINGLY:
            return False
        if not all(map(_is_of_tensors, chain(container, before))):
            return False
        read = (r for r in self.reads.values() if r.place.holder is container)
        found = any(r.place.kind == "item" and r.value is not MISSING for r in read)
        return found or id(container) in self._gone_over or any(map(is_stand_in, before))

    def _puts_anew(self, changed: ChangedContainer) -> None:
        container, before = changed.container, changed.before
        path, line = self.path(container, type(container).__name__), changed.line
        self.size(container, path, line)
        for identity, each in list(self._places.items()):
            if each.place.holder is container:  # and has had another index since
                del self._places[identity]
        for index, (was, now) in enumerate(zip(before, container, strict=False)):
            place, at = OutsidePlace("item", container, index), f"{path}[{index}]"
            if was is now:
                continue
            if place.identity not in self.reads and not is_stand_in(was):
                self.reached(was, at)
                self.reads[place.identity] = self._made(place, was, at, line)
            self._places[place.identity] = WrittenPlace(place, was, None, at, line)
            self._written.add(place.identity)
        rest = list(container)[len(before) :]
        taken = ChangeByMethod("pop", (), takes=False), None
        changed.changes = [(ChangeByMethod("append"), each) for each in rest]
        changed.changes += [taken] * (len(before) - len(container))
        changed.otherwise = False
        self._put_anew.add(id(container))

    def written_arrays(self) -> list[Any]:
        """The arrays to which the step, or a function on the host, writes."""
        holders = [each for each, _ in self.rewritten.values()]
        holders += [each.place.holder for each in self._places.values()]
        own = [each for each in holders if hasattr(type(each), "tobytes")]
        return [*own, *self.laters.arrays.written()]

    def changed_holders(self) -> list[Any]:
        """The containers and objects to which the step has written."""
        written = [each.owner or each.place.holder for each in self._places.values()]
        return [*written, *(each.container for each in self._changes.values())]

    def changed_lengths(self) -> Iterator[tuple[str, OutsidePlace]]:
        """Lengths of lists and queues that the step changes by single items, and what it computes
        of them (`kept_lists`), where it reads nothing else of them."""
        for each in self._changes.values():
            reads = [r for r in self.reads.values() if r.place.holder is each.container]
            if isinstance(each.container, set) or not self._is_followed(each):
                continue
            if id(each.container) in self._gone_over:
                continue
            if all(read.place.kind in _OF_LISTS or _is_of_number(read) for read in reads):
                yield from ((r.path, r.place) for r in reads if r.value is not MISSING)

    def _is_followed(self, changed: ChangedContainer) -> bool:
        """Whether a list is changed by single items, or emptied."""
        hows = [how for how, _ in changed.changes]
        emptied = all(how.is_of_one_item or how.method == "clear" for how in hows)
        return not changed.otherwise and emptied

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
        self.texts.written(place)
        if self._is_its_own(place):
            self.mutated(place.holder, line or SourceLine("", 0, ""))
            return
        if place.kind == "item":
            self.puts_into(place.holder, place.key)
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
        if not isinstance(owner, types.ModuleType) and attributes_of(owner) is place.holder:
            self.owned(place.holder, owner)
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

    def _path_of(self, place: OutsidePlace, owner: Any) -> str:
        if owner is None or (place.kind == "item" and not isinstance(place.key, str)):
            holder = place.holder
            return f"{self.path(holder, type(holder).__name__)}[{key_text(place.key)}]"
        return f"{self.path(owner, type(owner).__name__)}.{place.key}"

    def has_written_item(self, array: Any, key: Any) -> bool:
        """Whether the step has put constants into items of an array that may be among those of a
        key; None: all."""
        places = [each.place for each in self._places.values() if each.place.holder is array]
        at_once = type(key) is int and key >= 0
        return any(
            not (at_once and type(p.key) is int and p.key >= 0 and p.key != key) for p in places
        )

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

    def has_changed(self, place: OutsidePlace) -> bool:
        """Whether the step has written to a place, or changed what the place is in."""
        return place.identity in self._written or id(place.holder) in self._mutated

    def times_found(self, value: Any) -> int:
        """In how many places that it has written the step has found an object."""
        return sum(each.before is value for each in self._places.values())

    def is_changed(self, container: Any) -> bool:
        """Whether the step has written to a container."""
        written = any(each.place.holder is container for each in self._places.values())
        return written or id(container) in self._mutated

    def is_read_otherwise(self, container: Any) -> bool:
        """Whether the step has read more of a list than its length, or given it away."""
        reads = (r.place for r in self.reads.values() if r.place.holder is container)
        return any(place.kind != "size" for place in reads) or id(container) in self.gone_into

    def is_used(self, container: Any) -> bool:
        """Whether the step has read a container, or given it to code that is not observed."""
        read = any(each.place.holder is container for each in self.reads.values())
        return read or self.is_gone_into(container) or self.is_changed(container)

    def is_input(self, place: OutsidePlace) -> bool:
        """Whether the graph takes the number in a place."""
        return place.identity in self._inputs

    def goes_by_keys(self, table: dict[Any, Any]) -> bool:
        """Whether the step has read keys or items of a dictionary, or the graph takes numbers of
        it."""
        if OutsidePlace("keys", table).identity in self.reads:
            return True
        places = (OutsidePlace(kind, table, key) for key in table for kind in ("item", "has"))
        return any(self.is_input(each) or each.identity in self.reads for each in places)

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

    def take_changed(self, replaced: Set[int]) -> Iterator[ChangedContainer]:
        """Lists, queues and sets that the step has changed, and not read; those that it has changed
        otherwise than by what can be done again have no changes. Nothing else remembers what it has
        put there from then on.

        Args:
            replaced: those that it may have read, by id, since it leaves others in their places.
                Others that it has read are `not_followed`.
        """
        read = {
            id(each.place.holder)
            for each in self.reads.values()
            if not (each.value is MISSING and isinstance(each.place.holder, (list, deque)))
        }
        changed, self._changes = self._changes, {}
        for key, each in changed.items():
            if key in self.repeated:
                continue
            if each.otherwise:
                each.changes.clear()
            if key not in read or key in replaced or key in self._put_anew:
                yield each
                continue
            if is_changed_to(each.container, each.before, ()) and not self.is_asked(each.container):
                self.holds_contents(each.container, each.line)  # of another it may leave less
            else:
                self.not_followed.append(each)

    def read_of(self, container: Any) -> Read:
        """What the step has read of a container, or that it goes through it."""
        reads = [
            r for r in self.reads.values() if r.place.holder is container or r.value is container
        ]
        first = next((r for r in reads if r.place.holder is container), reads[0])
        through = f"all of {self.path(container, 'it')}"
        return first._replace(path=through) if id(container) in self._gone_over else first

    def is_asked(self, container: Any) -> bool:
        """Whether the graph takes numbers of a container, such as its length."""
        return any(identity[1] == id(container) for identity in self._inputs)

    def places_of(self, value: Any) -> list[OutsidePlace]:
        """All places in which the step has read an object."""
        reads = chain(self.reads.values(), map(self._own_reads.__getitem__, self._replaced_own()))
        return [read.place for read in reads if read.value is value]

    def is_written(self, place: OutsidePlace) -> bool:
        """Whether the step has written to a place."""
        return place.identity in self._written

    def taken_from(self, table: dict[str, Any]) -> set[str]:
        """The keys of a dictionary whose numbers the graph takes."""
        return {key for key in table if OutsidePlace("item", table, key).identity in self._inputs}

    def has_written(self, table: dict[str, Any], key: str) -> bool:
        """Whether the step wrote to an item of a dictionary."""
        return OutsidePlace("item", table, key).identity in self._written

    def _changed(self) -> tuple[Read, Any] | None:
        """A place that the step has read, and then changed, and what is there now."""
        for read in self.reads.values():
            now = read.place.now()
            if not same(now, read.value) and id(read.place.holder) not in self.repeated:
                return read, now
        return None


_FOLLOWED_SINGLY = 64
"""Of longer lists and queues, the items are not followed one by one where a step moves them."""
_OF_LISTS = frozenset({"size", "sum", "min", "max", "last"})
"""What is computed of a list, and known to a graph as a number."""


def _is_of_number(read: Read) -> bool:
    """Whether an item of a list is read that is a number, or that is not there."""
    is_item = read.place.kind == "item" and type(read.place.key) is int
    return is_item and (read.value is MISSING or type(read.value) in (int, float))


def _is_of_tensors(value: Any) -> bool:
    leaves = value if type(value) is tuple else (value,)
    return all(isinstance(each, torch.Tensor) for each in leaves)


def _contents(container: Any) -> OutsidePlace:
    return OutsidePlace("keys" if isinstance(container, dict) else "whole", container)
