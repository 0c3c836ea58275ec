"""Lets what a graph reads and changes outside be found by its guard, in each call.

    PlacedNumber(losses.sum)     an input: of whichever object `losses` is
    PlacedResult(losses.sum)     and there the call leaves the next one

See `outside.moving`. Where the guard cannot find another object, each call needs the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from graphopt.guards.outside import OutsideGuard
from graphopt.tracing.inputs.entries import Inputs, PlacedNumber
from graphopt.tracing.inputs.implicit import ImplicitInputs
from graphopt.tracing.outside.moving import MovingTable, pin_others
from graphopt.tracing.outside.places import FollowedPlace, ListTable, OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.results.signature import PlacedResult, Signature
from graphopt.tracing.scalars.tuples import TupleTable


def following(
    record: Record, signature: Signature, inputs: Inputs, besides: ImplicitInputs
) -> OutsideGuard:
    """The guard of what a step has read outside, by which what its graph takes from there, and
    leaves there, is found from now on."""
    places = list(_places(signature, inputs, besides))
    pin_others(record, places)
    guard = OutsideGuard(record, places)
    signature.placed = [replace(each, place=guard.moved(each.place)) for each in signature.placed]
    for followed in _followed(signature):
        followed.place = guard.moved(followed.place)
    apart = tuple(_lists_changed(signature))
    inputs.hyperparameters = [
        replace(each, place=guard.moved(each.place), apart=apart)
        if isinstance(each, PlacedNumber)
        else each
        for each in inputs.hyperparameters
    ]
    for entry in inputs.module_tensors:
        entry.slots = [(_moved_table(guard, table), key) for table, key in entry.slots]
    besides.carried[:] = [each._replace(place=guard.moved(each.place)) for each in besides.carried]
    return guard


def _places(
    signature: Signature, inputs: Inputs, besides: ImplicitInputs
) -> Iterator[OutsidePlace]:
    yield from (each.place for each in signature.placed if each.within is None)
    yield from (each.place for each in _followed(signature) if each.within is None)
    yield from (each.place for each in besides.carried)
    yield from (each.place for each in inputs.hyperparameters if isinstance(each, PlacedNumber))


def _lists_changed(signature: Signature) -> Iterator[Callable[[], Any]]:
    """What gives the lists that the step changes in place."""
    placed = (each for each in signature.placed if type(each.place.holder) is list)
    yield from (partial(_holder, each) for each in placed)


def _holder(placed: PlacedResult) -> Any:
    return placed.now().holder


def _followed(signature: Signature) -> Iterator[FollowedPlace]:
    """The places of containers in which, or in what is in them, the step changes anything."""
    found = [each.within for each in signature.placed]
    for within in found:
        while within is not None:
            yield within
            within = within.within


def _moved_table(guard: OutsideGuard, table: Any) -> Any:
    if isinstance(table, TupleTable):
        table.place = guard.moved(table.place)
        return table
    if isinstance(table, ListTable):
        find = guard.holder_of(table.held)
        return table if find is None else ListTable(find)
    holder = guard.holder_of(table)
    return table if holder is None else MovingTable(holder)
