"""The objects that exist before a step is traced, as known to Python's garbage collector."""

from __future__ import annotations

import gc
import threading
from builtins import id as identity_of  # a step that is traced may have another in its place
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, repeat
from typing import Any

from graphopt.host.context import while_set
from graphopt.runtime.memory import BEFORE_AGEING, count_all_as_old

_callbacks = threading.RLock()
"""Held while the callbacks of the collector change, which captures of all threads do."""


class ExistingObjects:
    """The set of objects that were created before a moment."""

    def __init__(self, births: CreationTimes, moment: int) -> None:
        self._births, self._moment = births, moment

    def __contains__(self, value: Any) -> bool:
        return gc.is_tracked(value) and self._births.before(value, self._moment)


class CreationTimes:
    """The creation times of objects, as intervals between observed moments.

    New objects are in the collector's youngest generation until it runs. Each of its runs is
    preceded by a look at that generation, and each look moves what is there to an older one, so
    that an object is looked at once. Objects are known by their addresses and not kept alive:
    whatever is found at an address that a new object had is at least as new.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # by address, the moment before
        self._moment = 0
        self._some_frozen = gc.get_freeze_count() > 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While active, creation of objects is recorded; older objects count as created at 0."""
        self._look()
        self._made.clear()
        with _callbacks:
            gc.callbacks.append(self._before_run)
        BEFORE_AGEING.append(self._note)
        try:
            yield
        finally:
            BEFORE_AGEING.remove(self._note)
            with _callbacks:
                gc.callbacks.remove(self._before_run)

    def now(self) -> ExistingObjects:
        """The set of objects that exist now."""
        self._look()
        self._moment += 1
        return ExistingObjects(self, self._moment)

    def before(self, value: Any, moment: int) -> bool:
        """True if an object was created before a moment."""
        address = identity_of(value)
        if self._made.get(address) != self._moment:
            self._look()
        return self._made.get(address, 0) < moment

    def _look(self) -> None:
        self._note()
        if self._some_frozen:
            self._run()
        else:  # which moves everything in no time
            count_all_as_old()

    @staticmethod
    def _run() -> None:
        """Runs the collector on new objects, without the `gc.callbacks` of others, which would
        become part of the traced step."""
        with _callbacks:
            others = gc.callbacks[:]
            gc.callbacks.clear()
            try:
                gc.collect(0)
            finally:
                gc.callbacks[:] = others

    def _before_run(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._note()

    def _note(self) -> None:
        # In one call of C, during which no other thread runs: one that makes a tuple of what a
        # generator gives fails where somebody has a reference to it, as this list would.
        objects = chain.from_iterable(map(gc.get_objects, (0,)))
        self._made.update(zip(map(identity_of, objects), repeat(self._moment)))


_births: ContextVar[CreationTimes | None] = ContextVar("births", default=None)


@contextmanager
def births_noted() -> Iterator[None]:
    """While active, one capture records when objects are created."""
    births = CreationTimes()
    with while_set(_births, births), births.noted():
        yield


def births_are_noted() -> bool:
    """True if `births_noted` is active."""
    return _births.get() is not None


def existing_now() -> ExistingObjects:
    """The set of objects that exist now; needs `births_noted`."""
    births = _births.get()
    assert births is not None
    return births.now()
