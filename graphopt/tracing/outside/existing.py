"""Which objects there are before a step is traced, as Python's garbage collector knows them."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress, count, repeat
from typing import Any

import torch

_STORAGE = torch.UntypedStorage
_NOBODY = object()


class Existing:
    """All objects that there are now. They are kept alive, so that no other object gets the
    identity of one of them.

    Args:
        before: those that there were a moment ago. What is new since then is kept apart by the
            collector until it runs, so that not everything has to be gone through again.
    """

    def __init__(self, before: Existing | None = None) -> None:
        objects = [] if before is None else gc.get_objects(generation=0)
        if before is not None and not any(each is before._mark for each in objects):
            before = None
        self._before = before
        self._objects = gc.get_objects() if before is None else objects + before._alive_storages()
        self._storages: list[weakref.ref[Any]] = []
        self._identities: set[int] | None = None
        self._mark: list[Any] = []  # among the new objects for as long as all of those are

    def __contains__(self, value: Any) -> bool:
        if self._identities is None:
            self._identities = set(map(id, self._objects))
        if id(value) in self._identities:
            return True
        return self._before is not None and value in self._before

    def without_storages(self) -> Existing:
        """The same, without the storages of tensors, whose uses are counted between two traces."""
        are_storages = map(operator.is_, map(type, self._objects), repeat(_STORAGE))
        for place in list(compress(count(), are_storages)):
            self._storages.append(weakref.ref(self._objects[place]))
            self._objects[place] = _NOBODY
        return self

    def _alive_storages(self) -> list[Any]:
        found = (reference() for reference in self._storages)
        return [storage for storage in found if storage is not None]

    def let_go(self) -> None:
        """Keep nothing alive any more."""
        self._before, self._objects, self._identities = None, [], None


_kept: ContextVar[list[Existing] | None] = ContextVar("kept", default=None)


@contextmanager
def existing_kept() -> Iterator[None]:
    """While active, the traces of one capture share what `note_existing` has found."""
    if _kept.get() is not None:
        yield
        return
    token = _kept.set([])
    try:
        yield
    finally:
        forget_existing()
        _kept.reset(token)


def note_existing() -> None:
    """All traces that follow go on from the objects that are there now: nothing may be counted
    among them that is to be gone before those traces."""
    forget_existing()
    kept = _kept.get()
    if kept is not None:
        kept.append(Existing().without_storages())


def forget_existing() -> None:
    """Let go of what was noted."""
    kept = _kept.get()
    while kept:
        kept.pop().let_go()


def existing_now() -> Existing:
    """All objects that are there now."""
    kept = _kept.get()
    return Existing(kept[0] if kept else None)
