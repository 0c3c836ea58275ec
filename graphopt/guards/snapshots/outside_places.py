"""Conversion of many guarded places to one snapshot, which is fast to compare."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from graphopt.guards.snapshots.conditions import Referred
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
    if entry.kind == "has":
        snapshot.has_key(holder, entry.key, bool(entry.value))
    elif entry.kind == "size":
        snapshot.has_length(holder, entry.expected())
    elif entry.kind == "keys" and type(holder) is dict and tuple(holder) == entry.expected():
        snapshot.has_keys(holder)
    elif entry.kind == "type":
        snapshot.has_class(entry.holder.get, entry.expected())
    else:
        return _object_described(entry, holder, snapshot)
    return True


def _object_described(entry: GuardedPlace, holder: Any, snapshot: StateSnapshot) -> bool:
    """Adds to a snapshot which object is in a place, or that there is none."""
    kind, key, held, expected = entry.kind, entry.key, entry.held, entry.expected()
    table = vars(holder) if kind == "class" else holder
    if expected is MISSING:
        is_absent = kind in ("item", "class") and not isinstance(holder, list)
        if is_absent:
            snapshot.has_key(table, key, False)
        return is_absent
    if held is not None and held.owner is not None:  # reached through another guarded object
        return False
    value = expected if held is None or not held.weak else Referred(entry.reference)
    if kind == "class" or (kind == "item" and type(holder) in _PLAIN):
        snapshot.has(table, key, value)
    elif kind == "cell":
        snapshot.has_attribute_of(holder, "cell_contents", value)
    elif kind != "attribute" or OutsidePlace(kind, holder, key).now() is not expected:
        return False  # a new object at each read, of which only the value compares
    elif entry.holder.weak:
        snapshot.has_attribute(entry.holder.reference, key, value)
    elif entry.holder.owner is None:
        snapshot.has_attribute_of(holder, key, value)
    else:
        return False
    return True
