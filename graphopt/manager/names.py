"""Suggestions for unknown names: the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if names:
        return f"; there are {', '.join(names)}"
    return "; there are none"
