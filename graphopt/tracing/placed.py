"""What a step leaves outside its arguments: tensors and numbers in attributes of `self`, in
dictionaries, in variables of closures and modules.

    self.fake = generator(z)         the graph returns the tensor, and every call puts it there
    self.hidden = cell(x, self.hidden)    the place is an input besides: it holds another tensor in
                                          each call, which is no reason to capture anew
    self.steps += 1                  a number is an input as well, and every call puts the next
                                     one there
    history.append(loss.item())      every call appends its own number

Told from what is written there by the step's instructions (`outside`). What is put there by code
that is not followed, or put into a list otherwise, is found later, and refused.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host.changes import MUTABLE, Change, is_changed_to, put_back
from graphopt.tracing.besides import CarriedPlace, Finder
from graphopt.tracing.call import Call
from graphopt.tracing.draws.arguments import is_known
from graphopt.tracing.guard_values import is_plain
from graphopt.tracing.inputs import is_exact
from graphopt.tracing.number_tuples import leaves_of
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.attributes import attributes_of
from graphopt.tracing.outside.places import MISSING, OutsidePlace, is_value, same
from graphopt.tracing.outside.record import ChangedContainer, Record, WrittenPlace
from graphopt.tracing.reachable import is_shared
from graphopt.tracing.signature import Constant


@dataclass(frozen=True)
class Placed:
    """A value that the step has left in a place outside.

    Attributes:
        within: the place in which each call finds the container that it is an item of; None where
            that is the same in each call.
    """

    place: OutsidePlace
    value: Any
    within: OutsidePlace | None = None


@dataclass(frozen=True)
class Changed:
    """How the step has changed a list, queue or set outside.

    Attributes:
        changes: in order.
        items: the value of each: recipes of constants; what is computed, and nests, as the step has
            left them.
        within: as of `Placed`.
    """

    container: Any
    changes: tuple[Change, ...]
    items: list[Any]
    within: OutsidePlace | None = None


def take_placed(
    record: Record,
    finder: Finder,
    stand_ins: Mapping[int, torch.Tensor],
    tables: Iterable[dict[str, Any]],
) -> list[Placed]:
    """Take out what a traced step has put into places outside; there is then what was before. Where
    the step finds a tensor or a number in such a place, and leaves another one, the finder takes
    note.

    Args:
        record: of the step, which is not finished yet.
        stand_ins: of the inputs, by the id of the real tensor.
        tables: those that are looked after otherwise.
    """
    others = set(map(id, tables))
    found, exchanged = [], _exchanged(record)
    for written in list(record.written_places()):
        place, before, value = written.place, written.before, written.place.now()
        if record.depends_on(place) and not _is_left_alone(written):
            note_counted(finder, written.path, place, before, value)
            if is_exact(before) and isinstance(value, torch.Tensor) and record.counts_in(place):
                record.begins(place, before)
        if id(place.holder) in others or _is_left_alone(written):
            continue
        if value is before and type(value) in MUTABLE and record.depends_on(place):
            continue  # which has been changed in place
        if not _is_taken(record, written, value):
            continue
        place.write(before)
        if isinstance(before, torch.Tensor) and value is _stand_in(before, stand_ins, finder):
            continue  # which has been updated in place
        within = exchanged.get(id(place.holder))
        if within is None:
            for each in (place.holder, written.owner, record.owner(place.holder)):
                record.pin(each)
        if within is None and _is_found(record, written):
            finder.carries(written.path, place)
        told = _told(record, value)
        found.append(Placed(place, value if told is None else told, within))
    return found


def _exchanged(record: Record) -> dict[int, OutsidePlace]:
    """The containers outside, by id, in whose place the step leaves a new one, each with that place
    (`self.backup = {}`), where the step has got to it by that alone: each call finds another."""
    found = {}
    for written in record.written_places():
        before = written.before
        new = _is_new(record, written) or _is_traced(written.place.now(), numbers=True)
        if type(before) in _CONTAINERS and new and _is_at(record, before, written.place):
            found[id(before)] = written.place
    return found


def _is_at(record: Record, value: Any, place: OutsidePlace) -> bool:
    """Whether a step has got to an object by one place alone, and goes by what is in it."""
    places = record.places_of(value)
    alone = bool(places) and all(each.identity == place.identity for each in places)
    return alone and not record.is_pinned(value)


_CONTAINERS = (dict, list, deque)


def _is_new(record: Record, written: WrittenPlace) -> bool:
    """Whether a step leaves a container that it has made, of nothing but plain values, in the place
    of one of that kind."""
    value = written.place.now()
    if type(value) not in (dict, list) or type(value) is not type(written.before):
        return False
    if not written.place.is_item or record.is_outside(value):
        return False
    if sum(each.place.now() is value for each in record.written_places()) > 1:
        return False  # both places have one container, and not one each
    return is_plain(tuple(value.values() if isinstance(value, dict) else value))


def _is_left_alone(written: WrittenPlace) -> bool:
    """Whether a place belongs to a stand-in, or to an object that other threads work with."""
    if _compat.is_fake(written.owner):
        return True
    attributes = None if written.owner is None else attributes_of(written.owner)
    return attributes is written.place.holder and is_shared(attributes)


def note_counted(finder: Finder, path: str, place: OutsidePlace, before: Any, value: Any) -> None:
    """The step finds `before` in a place, which it has used, and leaves a value: where both are
    numbers, or tuples of numbers, the place becomes an input."""
    if _are_counts(before, value) and not same(before, value):
        finder.carries(path, place, counted=True)


def _are_counts(before: Any, value: Any) -> bool:
    if is_exact(before):
        return _is_number(value)
    found, left = leaves_of(before, is_exact), leaves_of(value, _is_number)
    return found is not None and left is not None and found[1] == left[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, SYMBOLIC) or type(value) in (int, float)


def _is_taken(record: Record, written: WrittenPlace, value: Any) -> bool:
    """Whether each call puts a value there, rather than the capture alone."""
    place, reads = written.place, record.depends_on(written.place)
    if record.is_input(place):
        if value is MISSING:
            raise CaptureError(
                f"it deletes {written.path}, in which it counts",
                hint="give it another value, or delete it outside the step",
            )
        return True
    if _is_traced(value, numbers=True):
        return place.is_item or _is_traced(value, numbers=True, tensors=False)
    if _is_new(record, written):
        return True
    if not is_plain(value):
        keyed = value is MISSING and isinstance(place.key, torch.Tensor)  # by what stands for it
        told = None if reads or keyed or not place.is_item else _told(record, value)
        if told is None and not reads and _holds_traced(record, value):
            record.refused = record.refused or CaptureError(
                f"it puts a {type(value).__name__} that holds a tensor into {written.path}",
                hint="put the tensor there, or a tuple, dictionary or data class of its values",
            )
        return told is not None
    if not reads or (record.is_told(place) and type(written.before) not in (int, float)):
        return True
    return written.before is MISSING and record.counts_in(place)


def take_changed(
    record: Record, placed: Iterable[Placed], puts_back: Callable[[Any], bool]
) -> list[Changed]:
    """Take out what a traced step has put into lists, queues and sets outside, where these are
    tensors, numbers, texts, nests of them, or objects from outside.

    Args:
        placed: what it has left in places, in which there is what was before.
        puts_back: whether an object is as it was when the trace is over. What other threads may be
            changing is not.
    """
    found = []
    exchanged = {id(each.place.now()): each.place for each in placed}
    for each in record.take_changed():
        if not puts_back(each.container):
            continue
        items = [_told(record, value) for _, value in each.changes]
        if isinstance(each.container, set) and not all(isinstance(i, Constant) for i in items):
            continue  # where it stands in a set goes by what stands for it
        if any(item is None for item in items):
            record.refused = record.refused or _puts_new(record, each, items)
            continue
        if not is_changed_to(each.container, each.before, each.changes):
            if not is_changed_to(each.container, each.before, ()):
                record.refused = record.refused or _changes_otherwise(record, each)
            continue
        put_back(each.container, each.before)
        within = exchanged.get(id(each.container))
        if within is None or not _is_at(record, each.container, within):
            within = None
            record.pin(each.container)
        changes = tuple(change for change, _ in each.changes)
        found.append(Changed(each.container, changes, items, within))
    return found


def _told(record: Record, value: Any, within: frozenset[int] = frozenset()) -> Any:
    """What every call puts there: a recipe of a value or of an object that was there before the
    step; what is traced; or a nest of these to be made anew. None where it is none of these, as a
    nest that contains itself."""
    if isinstance(value, SYMBOLIC) or _compat.is_fake(value) or is_known(value):
        return value
    if is_value(value):
        return Constant(value)
    if record.is_outside(value):
        record.pin(value)
        return Constant(value)
    opened = None if id(value) in within else _compat.opened(value)
    if opened is None:
        return None
    inner, filled = opened
    told = [_told(record, each, within | {id(value)}) for each in inner]
    return None if any(each is None for each in told) else filled(told)


def _puts_new(record: Record, changed: ChangedContainer, told: Sequence[Any]) -> CaptureError:
    made = [value for (_, value), each in zip(changed.changes, told, strict=True) if each is None]
    kinds = " and a ".join(sorted({type(value).__name__ for value in made}))
    path = record.path(changed.container, type(changed.container).__name__)
    return CaptureError(
        f"it puts a {kinds} that it makes into {path}, which would happen at capture only",
        location=str(changed.line),
        hint="put a tuple, dictionary or data class of its values there, or do it outside the step",
    )


def _changes_otherwise(record: Record, changed: ChangedContainer) -> CaptureError:
    path = record.path(changed.container, type(changed.container).__name__)
    return CaptureError(
        f"it changes {path} in a way that is not followed, which would happen at capture only",
        location=str(changed.line),
        hint="append, insert, add or delete single items, or do it outside the step",
    )


def _stand_in(tensor: torch.Tensor, known: Mapping[int, torch.Tensor], finder: Finder) -> Any:
    return known.get(id(tensor), finder.stand_in_of(tensor))


def _is_traced(value: Any, numbers: bool = False, tensors: bool = True) -> bool:
    """Whether a value is, or contains, what is traced, and nothing that is not among the kinds
    allowed. A nest that contains itself cannot be made anew, and is left to be refused."""
    leaves, pending = [], [(value, frozenset[int]())]
    while pending:
        each, within = pending.pop()
        if not isinstance(each, (list, tuple, dict)):
            leaves.append(each)
        elif id(each) in within:
            return False
        else:
            inner = each.values() if isinstance(each, dict) else each
            pending.extend((item, within | {id(each)}) for item in inner)
    of_numbers = any(isinstance(leaf, SYMBOLIC) for leaf in leaves)
    of_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if (of_numbers and not numbers) or (of_tensors and not tensors):
        return False
    return of_numbers or any(map(_compat.is_fake, leaves))


_NEAR = 1000


def _holds_traced(record: Record, value: Any) -> bool:
    """Whether an object that the step has made holds what is traced, itself or in its own."""
    seen, pending = {id(value)}, [value]
    while pending and len(seen) < _NEAR:
        each = pending.pop()
        if _compat.is_fake(each) or isinstance(each, SYMBOLIC):
            return True
        if isinstance(each, (type, ModuleType, FunctionType)) or record.is_outside(each):
            continue
        inner = [held for held in gc.get_referents(each) if id(held) not in seen]
        seen.update(map(id, inner))
        pending.extend(inner)
    return False


def _is_found(record: Record, item: WrittenPlace) -> bool:
    """Whether the step uses the tensor that it finds where it leaves another one, and finds it
    nowhere else."""
    before = item.before
    if not isinstance(before, torch.Tensor) or _compat.is_fake(before):
        return False
    if not item.place.is_item:
        return False
    places = record.places_of(before)
    return all(place.identity == item.place.identity for place in places) and (
        bool(places) or record.path_to(before) is not None
    )


class FoundPlace(NamedTuple):
    """An item of a dictionary in which a step has found a tensor, or a number. Neither the object
    whose attribute it is nor the tensor is kept alive.

    Attributes:
        holder: gives that object, or the dictionary.
        value: the number, or a weak reference to the tensor.
    """

    path: str
    holder: Callable[[], Any]
    key: Any
    value: Any

    @property
    def table(self) -> dict[Any, Any]:
        """The dictionary; an empty one where the object is gone."""
        holder = self.holder()
        return holder if isinstance(holder, dict) else attributes_of(holder) or {}

    def is_changed(self) -> bool:
        """Whether another tensor, or another number of its kind, is there now."""
        now = self.table.get(self.key)
        if isinstance(self.value, weakref.ref):
            return isinstance(now, torch.Tensor) and now is not self.value()
        return type(now) is type(self.value) and is_exact(now) and now != self.value


def found_places(record: Record, call: Call) -> Iterator[FoundPlace]:
    """Where a step has found tensors, each in one place, and numbers."""
    for read in record.reads.values():
        value = read.value
        if not read.place.is_item or not (is_exact(value) or _is_in_one_place(record, value)):
            continue
        kept = weakref.ref(value) if isinstance(value, torch.Tensor) else value
        yield FoundPlace(read.path, _holder(record, read.place.holder), read.place.key, kept)
    for name, module in call.named_submodules():
        for key, value in vars(module).items():
            if is_exact(value):
                yield FoundPlace(f"{name}.{key}".strip("."), weakref.ref(module), key, value)


def _is_in_one_place(record: Record, value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor) and not value.requires_grad
    return tensor and len(record.places_of(value)) == 1


def _holder(record: Record, table: dict[Any, Any]) -> Callable[[], Any]:
    owner = record.owner(table)
    if owner is None:
        return lambda: table
    try:
        return weakref.ref(owner)
    except TypeError:  # of some kinds there are no weak references
        return lambda: owner


def changing(captured: Iterable[Sequence[FoundPlace]]) -> list[CarriedPlace]:
    """Places to be inputs from now on: those of tensors that are others than in an earlier graph,
    and those of numbers that are others than in two."""
    times: Counter[tuple[int, Any]] = Counter()
    found: dict[tuple[int, Any], CarriedPlace] = {}
    for places in captured:
        for each in filter(FoundPlace.is_changed, places):
            table = each.table
            known = (id(table), each.key)
            times[known] += 2 if isinstance(each.value, weakref.ref) else 1
            found[known] = CarriedPlace(each.path, OutsidePlace("item", table, each.key))
    return [place for known, place in found.items() if times[known] > 1]
