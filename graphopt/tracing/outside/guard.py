"""Whether everything that a step read outside its arguments is still as it was.

Asked before every call of a step, so the usual answer is found by a few sweeps in C over all places
of one kind, of some tens of nanoseconds for each. Only where a sweep finds another object are the
places looked at one by one, equal numbers told from others, and the path of a change is named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, contains, getitem, is_
from typing import Any

import torch

from graphopt.tracing.object_guards import ModuleGuards
from graphopt.tracing.outside.places import MISSING, Place, Read, is_value, same
from graphopt.tracing.outside.record import Record

_CONTENTS = attrgetter("cell_contents")


class OutsideGuard:
    """Holds what a record holds. Neither the objects read nor their owners are kept alive by it:
    where one of them is gone, so is all that the guard has, and it never fits again."""

    def __init__(self, record: Record) -> None:
        self._reads = [_settled(read) for read in record.reads.values()]
        self.modules = ModuleGuards(
            (name, module, _assigned(record, module)) for name, module in record.modules.values()
        )
        self.alive = True
        drop = _Drop(self)
        self._owners = [
            weakref.ref(owner(), drop)
            for owner in {read.owner for read in self._reads if read.owner is not None}
            if owner() is not None
        ]
        self._owners += [weakref.ref(module, drop) for _, module in record.modules.values()]
        self._values = [_Held(read.value) for read in self._reads]
        self._sweeps = self._prepared()

    def mismatches(self) -> Iterator[str]:
        """What has changed: the path to it, the values, and the line that read it."""
        if not self.alive:
            yield "an object that it read is gone"
            return
        yield from self.modules.mismatches()
        if all(sweep() for sweep in self._sweeps):
            return
        changes = list(filter(None, map(_change, self._reads, self._values)))
        if not changes:  # equal values in other objects: those are looked for from now on
            self._values = [_Held(read.place.now()) for read in self._reads]
            self._sweeps = self._prepared()
        yield from changes

    def drop(self) -> None:
        """Let go of everything."""
        self.alive = False
        self._reads, self._values, self._sweeps, self._owners = [], [], [], []
        self.modules = ModuleGuards(())

    def _prepared(self) -> list[Callable[[], bool]]:
        by_kind: dict[str, list[tuple[Read, _Held]]] = {}
        for read, value in zip(self._reads, self._values, strict=True):
            by_kind.setdefault(_sweep_of(read, value), []).append((read, value))
        return [_SWEEPS[kind](entries) for kind, entries in by_kind.items()]


class _Drop:
    """Tells a guard that something it needs is gone."""

    def __init__(self, guard: OutsideGuard) -> None:
        self._guard = weakref.ref(guard)

    def __call__(self, reference: weakref.ref[Any]) -> None:
        guard = self._guard()
        if guard is not None:
            guard.drop()


class _Held:
    """A value to compare with, kept alive only where nothing else could tell it from another."""

    __slots__ = ("_weak", "_value")

    def __init__(self, value: Any) -> None:
        self._value, self._weak = value, False
        if not is_value(value) and not isinstance(value, type):
            try:
                self._value, self._weak = weakref.ref(value), True
            except TypeError:
                return

    @property
    def weak(self) -> bool:
        return self._weak

    @property
    def stored(self) -> Any:
        """The value, or the weak reference to it."""
        return self._value

    def get(self) -> Any:
        return self._value() if self._weak else self._value


def _settled(read: Read) -> Read:
    """Functions that have stand-ins while a step is traced are themselves again."""
    if callable(read.value):
        return read._replace(value=read.place.now())
    return read


def _assigned(record: Record, module: torch.nn.Module) -> set[str]:
    return {key for key in vars(module) if record.has_written(vars(module), key)}


def _change(read: Read, held: _Held) -> str | None:
    now, before = read.place.now(), held.get()
    if same(now, before):
        return None
    return f"{read.path}: {shown(before)} -> {shown(now)}, read at {read.line.file}:{read.line.line}"


def shown(value: Any) -> str:
    """A value in a message."""
    if value is MISSING:
        return "nothing"
    text = repr(value) if is_value(value) else f"<{type(value).__name__}>"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and not is_value(value):
        text = name
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------- sweeps

Entries = Iterable[tuple[Read, _Held]]


def _sweep_of(read: Read, value: _Held) -> str:
    kind = read.place.kind
    if kind in ("item", "class"):
        if read.value is MISSING:
            return "slow" if isinstance(read.place.holder, (list, tuple)) else "missing"
        return "weak item" if value.weak else "item"
    if kind in ("has", "size"):
        return kind
    return "weak" if value.weak and kind in ("attribute", "cell") else "slow"


def _items(entries: Entries) -> Callable[[], bool]:
    holders, keys, values = _columns(entries)

    def hold() -> bool:
        try:
            return all(map(is_, map(getitem, holders, keys), values))
        except (KeyError, IndexError):
            return False

    return hold


def _weak_items(entries: Entries) -> Callable[[], bool]:
    holders, keys, references = _columns(entries)

    def hold() -> bool:
        try:
            return all(map(is_, map(getitem, holders, keys), [each() for each in references]))
        except (KeyError, IndexError):
            return False

    return hold


def _missing(entries: Entries) -> Callable[[], bool]:
    holders, keys, _ = _columns(entries)
    return lambda: not any(map(contains, holders, keys))


def _has(entries: Entries) -> Callable[[], bool]:
    holders, keys, values = _columns(entries)
    return lambda: list(map(contains, holders, keys)) == values


def _sizes(entries: Entries) -> Callable[[], bool]:
    holders, _, values = _columns(entries)
    return lambda: list(map(len, holders)) == values


def _weak_others(entries: Entries) -> Callable[[], bool]:
    places = [read.place for read, _ in entries]
    references = [held.stored for _, held in entries]
    return lambda: all(p.now() is each() for p, each in zip(places, references, strict=True))


def _others(entries: Entries) -> Callable[[], bool]:
    places = [read.place for read, _ in entries]
    values = [held.stored for _, held in entries]
    return lambda: all(same(p.now(), value) for p, value in zip(places, values, strict=True))


def _table(place: Place) -> Any:
    return vars(place.holder) if place.kind == "class" else place.holder


def _columns(entries: Entries) -> tuple[list[Any], list[Any], list[Any]]:
    entries = list(entries)
    return (
        [_table(read.place) for read, _ in entries],
        [read.place.key for read, _ in entries],
        [held.stored for _, held in entries],
    )


_SWEEPS: dict[str, Callable[[Entries], Callable[[], bool]]] = {
    "item": _items,
    "weak item": _weak_items,
    "missing": _missing,
    "has": _has,
    "size": _sizes,
    "weak": _weak_others,
    "slow": _others,
}
