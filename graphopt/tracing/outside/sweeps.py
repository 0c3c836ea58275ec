"""Whether very many places hold what they have to: few sweeps in C over all places of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import contains, getitem, is_
from typing import Any

from graphopt.tracing.outside.held import GuardedPlace
from graphopt.tracing.outside.places import MISSING

Entries = Sequence[GuardedPlace]

_PLAIN = (dict, list, tuple)
"""Containers whose `[]` does nothing else."""


def prepared(entries: Entries) -> list[Callable[[], bool]]:
    """Sweeps over all entries. They keep alive what the entries look at."""
    by_kind: dict[str, list[GuardedPlace]] = {}
    for entry in entries:
        by_kind.setdefault(_sweep_of(entry), []).append(entry)
    return [_SWEEPS[kind](found) for kind, found in by_kind.items()]


def _sweep_of(entry: GuardedPlace) -> str:
    weak = entry.held is not None and entry.held.weak
    derived = entry.held is not None and entry.held.owner is not None
    if entry.kind in ("item", "class"):
        if entry.expected() is MISSING:
            return "slow" if isinstance(entry.holder.get(), (list, tuple)) else "missing"
        if derived or (entry.kind == "item" and type(entry.holder.get()) not in _PLAIN):
            return "slow"
        return "weak item" if weak else "item"
    if entry.kind == "attribute" and entry.holder.weak and entry.held is None:
        return "attribute"
    return entry.kind if entry.kind in ("has", "size", "type") else "slow"


def _items(entries: Entries) -> Callable[[], bool]:
    holders, keys = _columns(entries)
    values = [entry.expected() for entry in entries]

    def hold() -> bool:
        try:
            return all(map(is_, map(getitem, holders, keys), values))
        except (KeyError, IndexError):
            return False

    return hold


def _weak_items(entries: Entries) -> Callable[[], bool]:
    holders, keys = _columns(entries)
    references = [entry.reference for entry in entries]

    def hold() -> bool:
        try:
            return all(map(is_, map(getitem, holders, keys), [each() for each in references]))
        except (KeyError, IndexError):
            return False

    return hold


def _missing(entries: Entries) -> Callable[[], bool]:
    holders, keys = _columns(entries)
    return lambda: not any(map(contains, holders, keys))


def _has(entries: Entries) -> Callable[[], bool]:
    holders, keys = _columns(entries)
    values = [entry.value for entry in entries]
    return lambda: list(map(contains, holders, keys)) == values


def _sizes(entries: Entries) -> Callable[[], bool]:
    holders, _ = _columns(entries)
    values = [entry.value for entry in entries]
    return lambda: list(map(len, holders)) == values


def _types(entries: Entries) -> Callable[[], bool]:
    holders = [entry.holder.get for entry in entries]
    values = [entry.expected() for entry in entries]
    return lambda: [type(holder()) for holder in holders] == values


def _attributes(entries: Entries) -> Callable[[], bool]:
    references, names = [e.holder.reference for e in entries], [e.key for e in entries]
    values = [entry.value for entry in entries]

    def hold() -> bool:
        try:
            holders = [each() for each in references]
            return all(map(is_, map(getattr, holders, names), values))
        except AttributeError:
            return False

    return hold


def _others(entries: Entries) -> Callable[[], bool]:
    return lambda: all(entry.holds() for entry in entries)


def _columns(entries: Entries) -> tuple[list[Any], list[Any]]:
    holders = [entry.holder.get() for entry in entries]
    return (
        [vars(h) if e.kind == "class" else h for h, e in zip(holders, entries, strict=True)],
        [entry.key for entry in entries],
    )


_SWEEPS: dict[str, Callable[[Entries], Callable[[], bool]]] = {
    "item": _items,
    "weak item": _weak_items,
    "missing": _missing,
    "has": _has,
    "size": _sizes,
    "type": _types,
    "attribute": _attributes,
    "slow": _others,
}
