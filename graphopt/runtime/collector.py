"""Control of Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """While active, Python does not collect reference cycles.

    What was made meanwhile counts as old afterwards, so that it is not gone through at once, but
    with all the rest, when that is next due.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                count_all_as_old()
            gc.enable()


BEFORE_AGEING: list[Callable[[], None]] = []
"""Called before new objects count as old, by those who look for new ones: captures of all
threads."""


def count_all_as_old() -> None:
    """Moves all objects to the oldest generation, quickly. Nothing may be frozen (`gc.freeze`)."""
    for look in tuple(BEFORE_AGEING):
        look()
    gc.freeze()
    gc.unfreeze()


@contextmanager
def frozen_objects_seen() -> Iterator[None]:
    """While active, `gc.get_referrers` also finds frozen objects. If there were any, all objects
    are frozen afterwards."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.collect(0)  # for those who look at what is new when the collector runs
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
