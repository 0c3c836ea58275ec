"""What a step leaves outside its arguments: tensors and numbers in attributes of `self`, in
dictionaries, in variables of closures and modules.

    self.fake = generator(z)         the graph returns the tensor, and every call puts it there
    self.hidden = cell(x, self.hidden)    the place is an input besides: it holds another tensor in
                                          each call, which is no reason to capture anew
    self.steps += 1                  a number is an input as well, and every call puts the next
                                     one there

Told from what is written there by the step's instructions (`outside`). What is put there by code
that is not followed is found later, and refused. What is put into lists: `changed`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host.changes import MUTABLE
from graphopt.tracing.besides import Finder
from graphopt.tracing.draws.arguments import is_known
from graphopt.tracing.draws.live import is_array
from graphopt.tracing.guard_values import is_plain
from graphopt.tracing.inputs import is_exact, may_be_input
from graphopt.tracing.later import (
    Later,
    as_later,
    holds_later,
    is_later,
    is_number_later,
    refuse_keys,
)
from graphopt.tracing.number_tuples import is_tensor, leaves_of
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.attributes import attributes_of
from graphopt.tracing.outside.places import MISSING, FollowedPlace, OutsidePlace, same
from graphopt.tracing.outside.record import Record, WrittenPlace
from graphopt.tracing.reachable import is_shared
from graphopt.tracing.scheduled import is_scheduled
from graphopt.tracing.told import holds_traced, told


@dataclass(frozen=True)
class Placed:
    """A value that the step has left in a place outside.

    Attributes:
        within: where each call finds the container that it is an item of; None where
            that is the same in each call.
    """

    place: OutsidePlace
    value: Any
    within: FollowedPlace | None = None


def take_placed(
    record: Record,
    finder: Finder,
    stand_ins: Mapping[int, torch.Tensor],
    tables: Iterable[dict[str, Any]],
    made: dict[int, Any],
) -> list[Placed]:
    """Take out what a traced step has put into places outside; there is then what was before. Where
    the step finds a tensor or a number in such a place, and leaves another one, the finder takes
    note.

    Args:
        record: of the step, which is not finished yet.
        stand_ins: of the inputs, by the id of the real tensor.
        tables: those that are looked after otherwise.
        made: what each call makes anew, by id; see `told`.
    """
    others = set(map(id, tables))
    found, exchanged = [], _exchanged(record)
    for written in list(record.written_places()):
        place, before, value = written.place, written.before, written.place.now()
        if is_known(value):
            value = value.calls.as_float(value)
        refuse_keys({place.key: None} if isinstance(place.key, str) else {})
        if record.depends_on(place) and not _is_left_alone(written):
            if note_counted(finder, written.path, place, before, value):
                place.write(before)  # the step is traced anew, and not everything is put back
                continue
            if is_exact(before) and isinstance(value, torch.Tensor) and record.counts_in(place):
                record.begins(place, before)
        if id(place.holder) in others:
            continue
        if isinstance(place.key, weakref.ref):  # of a weak dictionary, which is not put back
            kept = before is MISSING and isinstance(value, FunctionType)  # as singledispatch does
            if kept or same(before, value):
                _leave(record, written, value)
                continue
            place.write(before)
            record.unrepeated.refuse(written.path, written.line)
            continue
        if _is_left_alone(written):
            if not (_compat.is_fake(written.owner) or same(before, value)):
                place.write(before)
                record.unrepeated.refuse(written.path, written.line)
            continue
        if value is before and type(value) in MUTABLE and record.depends_on(place):
            continue  # which has been changed in place
        in_place = isinstance(before, torch.Tensor) and value is _stand_in(
            before, stand_ins, finder
        )
        left = value if in_place else _left_by_each_call(record, written, value, made)
        if left is None:
            if holds_later(value):
                place.write(before)
            else:
                _leave(record, written, value)
            continue
        place.write(before)
        if in_place:
            continue
        within = exchanged.get(id(place.holder))
        carried = isinstance(before, (torch.Tensor, tuple))  # perhaps, as an input of the graph
        if within is None and not carried and not record.depends_on(place):
            within = found_again(record, place.holder)
        if within is None:
            for each in (place.holder, written.owner, record.owner(place.holder)):
                record.pin(each)
        if within is None and _is_found(record, written):
            finder.carries(written.path, place)
        found.append(Placed(place, left, within))
    return found


def _leave(record: Record, written: WrittenPlace, value: Any) -> None:
    """The capture alone leaves a value in a place, where it has to be when a call begins."""
    if same(written.before, value):
        record.holds(written.place, value, written.path, written.line)
    elif not _is_traced(value, numbers=True):
        record.unrepeated.add(written.path, written.line)


def found_again(record: Record, container: Any) -> FollowedPlace | None:
    """Where each call finds a container that the step changes, be it another one than before, as
    where a program begins a new list in each epoch; None where it has to be the same one.

    The step has got to it by one place alone, which it leaves as it is, and goes by nothing but
    what the guard of the graph looks at there.
    """
    if type(container) not in _CONTAINERS or record.is_pinned(container):
        return None
    places = {place.identity: place for place in record.places_of(container)}
    if len(places) != 1 or record.is_asked(container):
        return None
    ((identity, place),) = places.items()
    written = any(each.place.identity == identity for each in record.written_places())
    if written or place.kind not in ("item", "cell"):
        return None
    within = found_again(record, place.holder)
    if within is None:
        record.pin(place.holder)
        record.pin(record.owner(place.holder))
    return FollowedPlace(place, within)


def _exchanged(record: Record) -> dict[int, FollowedPlace]:
    """The containers outside, by id, in whose place the step leaves a new one, each with that place
    (`self.backup = {}`), where the step has got to it by that alone: each call finds another."""
    found = {}
    for written in record.written_places():
        before = written.before
        new = _is_new(record, written) or _is_traced(written.place.now(), numbers=True)
        if type(before) in _CONTAINERS and new and is_at(record, before, written.place):
            found[id(before)] = FollowedPlace(written.place)
    return found


def is_at(record: Record, value: Any, place: OutsidePlace) -> bool:
    """Whether a step has got to an object by one place alone, and goes by what is in it."""
    places = record.places_of(value)
    alone = bool(places) and all(each.identity == place.identity for each in places)
    return alone and not record.is_gone_into(value)


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


def note_counted(finder: Finder, path: str, place: OutsidePlace, before: Any, value: Any) -> bool:
    """The step finds `before` in a place, which it has used, and leaves a value: where both are
    numbers, or tuples of numbers, the place becomes an input. Returns whether it was none."""
    counts = _are_counts(before, value) and not same(before, value)
    return counts and finder.carries(path, place, counted=True)


def _are_counts(before: Any, value: Any) -> bool:
    if is_array(before):
        return is_array(value) or is_known(value) or type(as_later(value)) is Later
    if may_be_input(before):
        return _is_number(value)
    found, left = leaves_of(before, is_exact), leaves_of(value, _is_number)
    return found is not None and left is not None and found[1] == left[1]


def _is_number(value: Any) -> bool:
    if is_scheduled(value):
        return bool(value.is_float)
    if type(value) in (int, float) or may_be_input(value):
        return True
    return isinstance(value, SYMBOLIC) or is_number_later(value)


def _left_by_each_call(
    record: Record, written: WrittenPlace, value: Any, made: dict[int, Any]
) -> Any:
    """What each call puts into a place, as `told` says it; None where the capture alone does."""
    place, reads = written.place, record.depends_on(written.place)
    if record.is_input(place) and value is MISSING:
        raise CaptureError(
            f"it deletes {written.path}, in which it counts",
            hint="give it another value, or delete it outside the step",
        )
    if _is_traced(value, numbers=True):
        alone = not isinstance(written.before, torch.Tensor)
        follows = (place.is_written if alone else place.may_carry) or not reads
        follows = follows or _is_traced(value, numbers=True, tensors=False)
        begins = is_number_later(value) and (written.before is None or written.before is MISSING)
        if reads and holds_later(value) and not (record.is_input(place) or begins):
            record.refused = record.refused or CaptureError(
                f"it reads {written.path} outside its arguments, and then puts a text or another"
                " value there that only Python computes, of what the graph gives",
                location=None if written.line is None else str(written.line),
                hint="keep it in another place than the one that is read, or let a function do it"
                " that is called in every step: graphopt.callback(function, value)",
            )
            return None
    elif is_plain(value):
        told_of = record.is_told(place) and type(written.before) not in (int, float)
        begins = written.before is MISSING and record.counts_in(place)
        follows = record.is_input(place) or not reads or told_of or begins
    else:
        keyed = value is MISSING and isinstance(place.key, torch.Tensor)  # by what stands for it
        empty = written.before is MISSING or written.before is None
        found = reads and not (empty and holds_traced(record, value))
        follows = record.is_input(place) or _is_new(record, written) or not (found or keyed)
    left = told(record, value, made) if follows else None
    if follows and left is None and _is_held(record, value, made):
        record.refused = record.refused or CaptureError(
            f"it puts a {type(value).__name__} that holds a tensor, or that it leaves elsewhere as"
            f" well, into {written.path}",
            location=None if written.line is None else str(written.line),
            hint="put the tensor there, or a tuple, dictionary or data class of its values",
        )
    return left


def _is_held(record: Record, value: Any, made: dict[int, Any]) -> bool:
    """Whether an object that the step has made holds what is traced, or stands elsewhere."""
    return id(value) in made or holds_traced(record, value)


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
    of_numbers = any(
        isinstance(leaf, SYMBOLIC) or is_scheduled(leaf) or is_later(leaf) for leaf in leaves
    )
    of_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if (of_numbers and not numbers) or (of_tensors and not tensors):
        return False
    return of_numbers or any(map(_compat.is_fake, leaves))


def _is_found(record: Record, item: WrittenPlace) -> bool:
    """Whether the step uses the tensor, or a tuple of tensors, that it finds where it leaves
    another one, and finds it nowhere else."""
    before = item.before
    tensors, _ = leaves_of(before, is_tensor) or ([before], None)
    if not all(isinstance(each, torch.Tensor) for each in tensors) or not item.place.may_carry:
        return False
    if any(map(_compat.is_fake, tensors)):
        return False
    own = {id(item.place.holder)} | set(map(id, _tuples_in(before)))
    places = record.places_of(before)
    of_tensors = chain.from_iterable(map(record.places_of, tensors))
    if not all(place.identity == item.place.identity for place in places):
        return False
    if not all(id(place.holder) in own for place in of_tensors if tensors[0] is not before):
        return False
    return bool(places) or record.path_to(before) is not None


def _tuples_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """A tuple, and those within it."""
    if isinstance(value, tuple):
        yield value
        yield from chain.from_iterable(map(_tuples_in, value))
