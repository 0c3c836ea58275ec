"""Recipes for values that a traced step stores outside, so that each call stores them again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.effects.argument_changes import ContainerChange
from graphopt.tracing.outside.places import OutsidePlace, is_value
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.results.signature import Constant, FromCall, FromPlace
from graphopt.tracing.rollback.nests import leaves_in
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.tensors.attributes import AttributeChange


def written_value(
    record: OutsideRecord, value: Any, made: MadeAnew, within: frozenset[int] = frozenset()
) -> Any:
    """The recipe of a stored value: a constant, an object from before the step, a traced value, or
    a nest of these. None for other values, as a nest that contains itself.

    Args:
        made: objects and containers that are made anew. One that stands there already is the same
            in all its places.
    """
    if isinstance(value, SYMBOLIC) or _compat.is_fake(value):
        return value
    if is_value(value) or isinstance(value, weakref.ref):
        return Constant(value)
    if id(value) in record.of_call:  # which are those of each call
        return FromCall(record.of_call[id(value)][1])
    if id(value) in record.stand_in_containers:  # what each call finds there
        _, place, path = record.stand_in_containers[id(value)]
        made[id(value)] = MadeNest(value, FromPlace(place, path))
    if record.is_outside(value):
        record.pin(value)
        return Constant(value)
    if id(value) in made:
        return made[id(value)].nest
    nest = None if id(value) in within else _compat.open_nest(value)
    if nest is None:
        return None
    inner, filled = nest
    items = [written_value(record, each, made, within | {id(value)}) for each in inner]
    new = None if any(item is None for item in items) else filled(items)
    if new is not None and not isinstance(value, tuple):
        made[id(value)] = MadeNest(value, new)
    return new


class MadeNest(NamedTuple):
    """A new object or container of a step, with the recipes of its parts, or one that each call
    finds in a place."""

    value: Any
    nest: Any


MadeAnew = dict[int, MadeNest]
"""What each call makes anew, by id: one for all places where it stands."""


def attribute_told(
    record: OutsideRecord, change: AttributeChange, made: MadeAnew
) -> AttributeChange:
    """The recipe form of an attribute change of a module that stores a new object or container.

    Raises:
        CaptureError: it cannot be made anew.
    """
    after = change.after
    if is_value(after) or _is_traced(after) or record.is_outside(after):
        return change
    nest = written_value(record, after, made)
    if nest is not None:
        return change._replace(after=nest, is_told=True)
    inner = leaves_in(after, _is_nest)
    objects = (each for each in inner if not is_value(each) and not _is_traced(each))
    location = record.location_of(OutsidePlace("item", change.table, change.key))
    raise refused_object(next(objects, after), change.name, location)


def change_told(record: OutsideRecord, change: ContainerChange, made: MadeAnew) -> ContainerChange:
    """The recipe form of a container change among the arguments.

    Raises:
        CaptureError: it puts an object there that cannot be made anew.
    """
    items = []
    for key, value in change.items:
        nest = written_value(record, value, made)
        if nest is None:
            raise refused_object(value, f"item {key!r} of a container among its arguments", None)
        items.append((key, nest))
    return replace(change, items=tuple(items))


def tell_shared(
    record: OutsideRecord, left: Iterable[Any], is_kept: Callable[[object], bool], made: MadeAnew
) -> None:
    """Makes new objects that occur in several stored values one object in each call.

    Args:
        left: what it returns, and leaves in attributes of modules.
        is_kept: whether something in these is made anew otherwise, or not at all.
    """
    parts = [each for value in left for each in _compat.result_parts(value, is_kept)]
    times = Counter(map(id, parts))
    for each in parts:
        if times[id(each)] > 1 and not (is_kept(each) or is_value(each) or isinstance(each, tuple)):
            written_value(record, each, made)


def refused_object(value: Any, path: str, location: str | None) -> CaptureError:
    """The reason why an object that a step has made cannot be stored in a place by each call."""
    hint = (
        "put the tensor there, or a tuple, list, dictionary or data class of its values; what is"
        " made once, make before the first step"
    )
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        hint = "make it outside the step"
    return CaptureError(
        f"it puts a {type(value).__name__} that it has made, and that no call can make anew, into"
        f" {path}",
        location=location,
        hint=hint,
    )


def _is_nest(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def _is_traced(value: Any) -> bool:
    return _compat.is_fake(value) or isinstance(value, SYMBOLIC)
