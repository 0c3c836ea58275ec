"""Values that a step stores outside its arguments: in attributes, dictionaries, closure variables
and globals.

    self.fake = generator(z)         the graph returns the tensor, and every call puts it there
    self.hidden = cell(x, self.hidden)    the place is an input besides: it holds another tensor in
                                          each call, which is no reason to capture anew
    self.steps += 1                  a number is an input as well, and every call puts the next
                                     one there

Told from what is written there by the step's instructions (`outside`). What is put there by code
that is not followed is found later and refused, and so is a list that it changes
(`OutsideRecord.refuse_changed`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch

from graphopt import _compat
from graphopt.guards.values import is_plain
from graphopt.tracing.effects.tuples import is_tensor, leaves_of, nests_in
from graphopt.tracing.effects.written_values import MadeAnew, refused_object, written_value
from graphopt.tracing.inputs.entries import is_exact, may_be_input
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.outside.changed_containers import MUTABLE
from graphopt.tracing.outside.places import LISTS, MISSING, OutsidePlace, attributes_of, same
from graphopt.tracing.outside.record import OutsideRecord, WrittenPlace
from graphopt.tracing.results.signature import Constant, PlacedResult
from graphopt.tracing.rollback.reachable import is_shared
from graphopt.tracing.rollback.substitute import StandIns
from graphopt.tracing.scalars.numbers import SYMBOLIC


def take_placed(
    record: OutsideRecord,
    finder: ImplicitInputFinder,
    traced: StandIns,
    tables: Iterable[dict[str, Any]],
    made: MadeAnew,
) -> list[PlacedResult]:
    """Takes out the values that a traced step has stored outside, and restores former ones. Tensors
    and numbers that the step replaces are reported to the finder.

    Returns:
        What each call leaves there, as `written_value` gives it; the recipes are yet to be made.

    Args:
        record: the record of the step, which is not finished yet.
        traced: the inputs.
        tables: those that are looked after otherwise.
        made: what each call makes anew, by id; see `written_value`.
    """
    gradients = set(map(id, traced.gradients.values()))
    places = _PlacedValues(*(record, finder, traced.by_id, gradients, made, set(map(id, tables))))
    all_written = list(record.written_places())
    for replaced in filter(partial(_is_found, record), record.replaced_own()):
        finder.carries(replaced.path, replaced.place)
    behind = [_keys_behind(written) for written in all_written]
    found = zip(map(places.taken, all_written), behind, strict=True)
    return [replace(each, behind=keys) for each, keys in found if each is not None]


def _keys_behind(written: WrittenPlace) -> tuple[Any, ...]:
    """The keys that a step has inserted into a dictionary behind a given one."""
    table, key = written.place.holder, written.place.key
    if (
        written.before is not MISSING
        or not written.place.is_item
        or not all(type(each) in (str, int) for each in (key, *table))  # others may not compare
        or key not in table
    ):
        return ()
    keys = list(table)
    return tuple(keys[keys.index(key) + 1 :])


@dataclass(frozen=True)
class _PlacedValues:
    """Takes the values out of the places that a step has written; see `take_placed`.

    Attributes:
        gradients: ids of stand-ins of gradients, which each call may find replaced.
        others: tables that are looked after otherwise, by id.
    """

    record: OutsideRecord
    finder: ImplicitInputFinder
    stand_ins: Mapping[int, torch.Tensor]
    gradients: Set[int]
    made: MadeAnew
    others: Set[int]

    def taken(self, written: WrittenPlace) -> PlacedResult | None:
        """The value that each call stores in a place, or None if it stores none there by itself."""
        record, place, before = self.record, written.place, written.before
        value = place.now()
        if type(place.holder) in LISTS and (is_tensor(before) or is_tensor(value)):
            self._leave_in_list(written, value)
            return None
        alone = _is_left_alone(written)
        read = record.depends_on(place) and not alone
        if read and note_counted(self.finder, written.path, place, before, value):
            place.write(before)  # the step is traced anew, and not everything is put back
            return None
        removed = value is MISSING and before is not MISSING and place.is_item
        if removed and not is_tensor(written.owner):
            there = OutsidePlace("has", place.holder, place.key)
            record.holds(there, True, written.path, written.line)  # or eager code raises
        if id(place.holder) in self.others:
            return None
        weak = isinstance(place.key, weakref.ref)
        if weak or alone:
            self._refuse(written, value, weak)
            return None
        if value is before and type(value) in MUTABLE and record.depends_on(place):
            return None  # which has been changed in place
        if self._is_moved(written, value) and self.finder.carries(written.path, place):
            place.write(before)
            return None
        found = self._is_stand_in(before, value)
        in_place = found and id(value) not in self.gradients and record.depends_on(place)
        left = value if in_place else _left_by_each_call(record, written, value, self.made)
        if left is None:
            _leave(record, written, value)
            return None
        place.write(before)
        return None if in_place else self._placed(written, left)

    def _leave_in_list(self, written: WrittenPlace, value: Any) -> None:
        """Restores an item of a list, and refuses another tensor there."""
        before = written.before
        written.place.write(before)
        if value is not before and not self._is_stand_in(before, value):
            self.record.unrepeated.add(written.path, written.line)

    def _refuse(self, written: WrittenPlace, value: Any, weak: bool) -> None:
        """Refuses a value in a place that is not restored: of a weak dictionary (as in
        `functools.singledispatch`), a stand-in, or an object shared by threads."""
        record, before = self.record, written.before
        kept = isinstance(value, FunctionType) and before is MISSING if weak else False
        if kept or same(before, value) or (not weak and _compat.is_fake(written.owner)):
            if weak:
                _leave(record, written, value)
            return
        written.place.write(before)
        record.unrepeated.refuse(written.path, written.line)

    def _placed(self, written: WrittenPlace, left: Any) -> PlacedResult:
        record, place = self.record, written.place
        if _is_found(record, written):
            self.finder.carries(written.path, place)
        return PlacedResult(place, left, line=written.location)

    def _is_moved(self, written: WrittenPlace, value: Any) -> bool:
        """True if a step replaces an outside tensor by another outside one, so that each call
        finds others."""
        tensors = isinstance(written.before, torch.Tensor) and isinstance(value, torch.Tensor)
        if not tensors or value is written.before or not self.record.depends_on(written.place):
            return False
        return self.record.is_outside(value) and _is_found(self.record, written)

    def _is_stand_in(self, before: Any, value: Any) -> bool:
        """True if a value stands for the tensor that was there before."""
        if not is_tensor(before) or not is_tensor(value):
            return False
        return value is self.stand_ins.get(id(before), self.finder.stand_in_of(before))


def _leave(record: OutsideRecord, written: WrittenPlace, value: Any) -> None:
    """Records a value that only the capture stores, and that each call must find in its place."""
    if same(written.before, value):
        record.holds(written.place, value, written.path, written.line)
    elif not _is_traced(value):
        place = written.place
        record.unrepeated.add(written.path, written.line)
        if is_plain(value) and place.is_written and not record.is_told(place):
            record.unrepeated.left.append((written.path, place))


def _is_left_alone(written: WrittenPlace) -> bool:
    """True if a place belongs to a stand-in, or to an object shared by threads."""
    if _compat.is_fake(written.owner):
        return True
    attributes = None if written.owner is None else attributes_of(written.owner)
    return attributes is written.place.holder and is_shared(attributes)


def note_counted(
    finder: ImplicitInputFinder, path: str, place: OutsidePlace, before: Any, value: Any
) -> bool:
    """Makes a place an input if the step replaces a number there by another one, or a tuple of them
    likewise. Returns True if it was not one before."""
    counts = _are_counts(before, value) and not same(before, value)
    return counts and finder.carries(path, place, counted=True)


def _are_counts(before: Any, value: Any) -> bool:
    if may_be_input(before):
        return _is_number(value)
    found, left = leaves_of(before, is_exact), leaves_of(value, _is_number)
    return found is not None and left is not None and found[1] == left[1]


def _is_number(value: Any) -> bool:
    if type(value) in (int, float) or may_be_input(value):
        return True
    return isinstance(value, SYMBOLIC)


def _left_by_each_call(
    record: OutsideRecord, written: WrittenPlace, value: Any, made: MadeAnew
) -> Any:
    """The value that each call stores (see `written_value`), or None if only the capture does."""
    place, reads = written.place, record.depends_on(written.place)
    if value is MISSING and not place.is_item:
        return None
    if value is MISSING and (record.is_input(place) or record.goes_by_keys(place.holder)):
        return Constant(MISSING)
    if _is_traced(value):
        alone = not isinstance(written.before, torch.Tensor)
        follows = (place.is_written if alone else place.may_carry) or not reads
        follows = follows or _is_traced(value, tensors=False)
    elif is_plain(value):
        told_of = record.is_told(place) and type(written.before) not in (int, float)
        follows = record.is_input(place) or not reads or told_of
    else:
        keyed = value is MISSING and isinstance(place.key, torch.Tensor)  # by what stands for it
        follows = record.is_input(place) or not (reads or keyed)
    left = written_value(record, value, made) if follows else None
    if follows and left is None:
        refused = refused_object(value, written.path, written.location)
        record.refused = record.refused or refused
    return left


def _is_traced(value: Any, tensors: bool = True) -> bool:
    """True if a value is or contains a traced one, with tensors only where they are allowed. A
    nested value that contains itself is left to be refused."""
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
    if not tensors and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    return of_numbers or any(map(_compat.is_fake, leaves))


def _is_found(record: OutsideRecord, item: WrittenPlace) -> bool:
    """True if the step uses the tensor, or the sequence of tensors, that it replaces here, and
    finds it nowhere else."""
    before = item.before
    if type(before) is list and record.is_changed(before):
        return False
    tensors, _ = leaves_of(before, is_tensor) or ([before], None)
    if not all(isinstance(each, torch.Tensor) for each in tensors) or not item.place.may_carry:
        return False
    if any(map(_compat.is_fake, tensors)):
        return False
    own = {id(item.place.holder)} | {id(each) for _, each in nests_in(before)}
    places = record.places_of(before)
    of_tensors = chain.from_iterable(map(record.places_of, tensors))
    if not all(place.identity == item.place.identity for place in places):
        return False
    if not all(id(place.holder) in own for place in of_tensors if tensors[0] is not before):
        return False
    return bool(places) or record.path_to(before) is not None
