"""Conversion of many guarded places to one snapshot, which is fast to compare."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from graphopt.guards.snapshots.snapshot import StateSnapshot
from graphopt.tracing.outside.held import GuardedPlace
from graphopt.tracing.outside.places import MISSING, OutsidePlace

_PLAIN = (dict, list)
"""Containers whose `[]` has no side effects."""

_FIXED = (tuple, CodeType)
"""Classes whose objects never change: a place in one holds as long as the object is there."""


def prepared(entries: Iterable[GuardedPlace]) -> StateSnapshot:
    """Returns a snapshot of all entries that is fast to compare; it keeps the entries' objects
    alive."""
    snapshot = StateSnapshot()
    for entry in entries:
        if not _described(entry, entry.holder.get(), snapshot):
            snapshot.also(entry.holds)
    return snapshot


def _described(entry: GuardedPlace, holder: Any, snapshot: StateSnapshot) -> bool:
    """Adds an entry to a snapshot. Returns False if a snapshot cannot express it."""
    if type(holder) in _FIXED:
        return True
    if entry.kind in ("item", "class"):
        return _item_described(entry, holder, snapshot)
    if entry.kind == "attribute":
        return _attribute_described(entry, snapshot)
    if entry.kind == "cell":
        return _cell_described(entry, holder, snapshot)
    if entry.kind == "has":
        snapshot.has_key(holder, entry.key, bool(entry.value))
    elif entry.kind == "size":
        snapshot.has_length(holder, entry.expected())
    elif entry.kind == "keys" and type(holder) is dict and tuple(holder) == entry.expected():
        snapshot.has_keys(holder)
    elif entry.kind == "type":
        snapshot.has_class(entry.holder.get, entry.expected())
    else:
        return False
    return True


def _item_described(entry: GuardedPlace, holder: Any, snapshot: StateSnapshot) -> bool:
    table = vars(holder) if entry.kind == "class" else holder
    held, expected = entry.held, entry.expected()
    if expected is MISSING:
        if isinstance(holder, list):
            return False
        snapshot.has_key(table, entry.key, False)
    elif _is_part(entry) or (entry.kind == "item" and type(holder) not in _PLAIN):
        return False
    elif held is not None and held.weak:
        snapshot.has_referred(table, entry.key, entry.reference)
    else:
        snapshot.has(table, entry.key, expected)
    return True


def _attribute_described(entry: GuardedPlace, snapshot: StateSnapshot) -> bool:
    held = entry.held
    if _is_part(entry) or _is_computed(entry):
        return False
    if not entry.holder.weak:
        if entry.holder.owner is not None:
            return False
        owner = entry.holder.get()
        if held is not None and held.weak:
            snapshot.has_attribute_of_referred(owner, entry.key, entry.reference)
        else:
            snapshot.has_attribute_of(owner, entry.key, entry.expected())
    elif held is not None and held.weak:
        snapshot.has_attribute_referred(entry.holder.reference, entry.key, entry.reference)
    else:
        snapshot.has_attribute(entry.holder.reference, entry.key, entry.expected())
    return True


def _cell_described(entry: GuardedPlace, holder: Any, snapshot: StateSnapshot) -> bool:
    held, expected = entry.held, entry.expected()
    if expected is MISSING or _is_part(entry):
        return False
    if held is not None and held.weak:
        snapshot.has_cell_referred(holder, entry.reference)
    else:
        snapshot.has_cell(holder, expected)
    return True


def _is_computed(entry: GuardedPlace) -> bool:
    """True if an attribute gives a new object at each read, so that only its value compares."""
    holder = entry.holder.get()
    return OutsidePlace(entry.kind, holder, entry.key).now() is not entry.expected()


def _is_part(entry: GuardedPlace) -> bool:
    """True if the object at a place is reached through another guarded object."""
    return entry.held is not None and entry.held.owner is not None
