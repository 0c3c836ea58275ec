"""What stays out of every garbage collection, and of what a capture looks at: what imports and the
tests before have made, a million objects."""

from __future__ import annotations

import gc
import sys

_count = gc.get_freeze_count
_modules = 0
_MANY = 20_000


def set_aside() -> None:
    """Freeze all objects that there are now, and count them once.

    `gc.get_freeze_count` goes through all of them, which takes a tenth of the time of a small
    capture. Objects are frozen and freed all the time without any effect on whether there are some,
    which is all that anybody asks.
    """
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)
    frozen = _count()
    gc.get_freeze_count = lambda: frozen


def set_rest_aside() -> None:
    """Freeze again, if modules were imported since, or tests have left much: captures look at all
    objects several times."""
    if len(sys.modules) > _modules:
        set_aside()
    elif len(gc.get_objects()) > _MANY:
        gc.collect()
        gc.freeze()
