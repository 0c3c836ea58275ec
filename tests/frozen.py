"""What stays out of every garbage collection: what imports and the tests before have made, a
million objects."""

from __future__ import annotations

import gc
import sys

_modules = 0
_MANY = 20_000


def set_aside() -> None:
    """Freeze all objects that there are now.

    `gc.get_freeze_count` goes through all of them, which takes a tenth of a second, and all that
    anybody asks is whether there are some: it says 1 from then on.
    """
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)
    gc.get_freeze_count = lambda: 1


def set_rest_aside() -> None:
    """Freeze again, if modules were imported since, or tests have left much."""
    if len(sys.modules) > _modules or len(gc.get_objects()) > _MANY:
        set_aside()
