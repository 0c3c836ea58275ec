"""Whether everything that a step read outside its arguments is still as it was.

Asked before every call of a step, so the usual answer is found by a few sweeps in C over all places
of one kind, of some tens of nanoseconds for each. Only where a sweep finds another object are the
places looked at one by one, equal numbers told from others, and the path of a change is named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import contains, getitem, is_
from types import ModuleType
from typing import Any

import torch

from graphopt.tracing.object_guards import ModuleGuards
from graphopt.tracing.outside.places import MISSING, Place, Read, is_value, same
from graphopt.tracing.outside.record import Record


class OutsideGuard:
    """Holds what a record holds. Neither the objects read nor their owners are kept alive by it:
    where one of them is gone, so is all that the guard has, and it never fits again."""

    def __init__(self, record: Record) -> None:
        self._gone: str | None = None
        reads = [_settled(read) for read in record.reads.values()]
        modules = record.modules.values()
        self._owners = [
            weakref.ref(module, _Drop(self, f"{name} is gone")) for name, module in modules
        ]
        for read in {id(read.owner): read for read in reads}.values():
            owner = None if read.owner is None else read.owner()
            if owner is not None:
                self._owners.append(weakref.ref(owner, _Drop(self, _lost(read))))
        self._entries = [_Entry(read, _Drop(self, _lost(read))) for read in reads]
        self._modules = ModuleGuards(
            (name, each, _assigned(record, each)) for name, each in modules
        )
        self._sweeps = self._prepared()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def alive(self) -> bool:
        """Whether it may fit again."""
        return self._gone is None

    def mismatches(self) -> Iterator[str]:
        """What has changed: the path to it, the values, and the line that read it."""
        if self._gone is not None:
            yield self._gone
            return
        yield from self._modules.mismatches()
        if all(sweep() for sweep in self._sweeps):
            return
        changes = [entry.change() for entry in self._entries]
        if not any(changes):  # equal values in other objects: those are looked for from now on
            for entry in self._entries:
                entry.refresh()
            self._sweeps = self._prepared()
        yield from filter(None, changes)

    def drop(self, reason: str) -> None:
        """Let go of everything."""
        self._gone = reason
        self._entries, self._sweeps, self._owners = [], [], []
        self._modules = ModuleGuards(())

    def _prepared(self) -> list[Callable[[], bool]]:
        by_kind: dict[str, list[_Entry]] = {}
        for entry in self._entries:
            by_kind.setdefault(_sweep_of(entry), []).append(entry)
        return [_SWEEPS[kind](entries) for kind, entries in by_kind.items()]


class _Drop:
    """Tells a guard that something it needs is gone."""

    def __init__(self, guard: OutsideGuard, reason: str) -> None:
        self._guard, self._reason = weakref.ref(guard), reason

    def __call__(self, reference: weakref.ref[Any]) -> None:
        guard = self._guard()
        if guard is not None and guard.alive:
            guard.drop(self._reason)


class _Held:
    """An object, kept alive only where it has to be: values, classes, containers."""

    __slots__ = ("stored", "weak")

    def __init__(self, value: Any, gone: Callable[[Any], None] | None = None) -> None:
        self.stored, self.weak = value, False
        if is_value(value) or isinstance(value, (type, ModuleType, frozenset)):
            return
        try:
            self.stored, self.weak = weakref.ref(value, gone), True
        except TypeError:
            return

    def get(self) -> Any:
        return self.stored() if self.weak else self.stored


class _Entry:
    """A place with the value it has to have."""

    def __init__(self, read: Read, gone: Callable[[Any], None]) -> None:
        self.kind, self.key, self.path, self.line = (
            read.place.kind,
            read.place.key,
            read.path,
            read.line,
        )
        self.holder = _Held(read.place.holder, gone)
        self.value = _Held(read.value)

    def now(self) -> Any:
        return Place(self.kind, self.holder.get(), self.key).now()

    def refresh(self) -> None:
        self.value = _Held(self.now())

    def change(self) -> str | None:
        now, before = self.now(), self.value.get()
        if same(now, before):
            return None
        line = f"{self.line.file}:{self.line.line}"
        return f"{self.path}: {shown(before)} -> {shown(now)}, read at {line}"


def _lost(read: Read) -> str:
    return f"the object of {read.path} is gone, read at {read.line.file}:{read.line.line}"


def _settled(read: Read) -> Read:
    """Functions that have stand-ins while a step is traced are themselves again."""
    if callable(read.value):
        return read._replace(value=read.place.now())
    return read


def _assigned(record: Record, module: torch.nn.Module) -> set[str]:
    return {key for key in vars(module) if record.has_written(vars(module), key)}


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

Entries = Sequence[_Entry]


def _sweep_of(entry: _Entry) -> str:
    if entry.kind in ("item", "class"):
        if entry.value.stored is MISSING:
            return "slow" if isinstance(entry.holder.get(), (list, tuple)) else "missing"
        return "weak item" if entry.value.weak else "item"
    if entry.kind == "attribute" and entry.holder.weak and not entry.value.weak:
        return "attribute"
    return entry.kind if entry.kind in ("has", "size", "type") else "slow"


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


def _types(entries: Entries) -> Callable[[], bool]:
    holders = [entry.holder.get for entry in entries]
    values = [entry.value.stored for entry in entries]
    return lambda: [type(holder()) for holder in holders] == values


def _attributes(entries: Entries) -> Callable[[], bool]:
    references, names = [e.holder.stored for e in entries], [e.key for e in entries]
    values = [entry.value.stored for entry in entries]

    def hold() -> bool:
        try:
            holders = [each() for each in references]
            return all(map(is_, map(getattr, holders, names), values))
        except AttributeError:
            return False

    return hold


def _others(entries: Entries) -> Callable[[], bool]:
    return lambda: all(same(entry.now(), entry.value.get()) for entry in entries)


def _columns(entries: Entries) -> tuple[list[Any], list[Any], list[Any]]:
    holders = [entry.holder.get() for entry in entries]
    return (
        [vars(h) if e.kind == "class" else h for h, e in zip(holders, entries, strict=True)],
        [entry.key for entry in entries],
        [entry.value.stored for entry in entries],
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
