"""How much of the random cases belongs to the normal run; `make test-all` makes all of them."""

from __future__ import annotations

_whole = True


def choose(whole: bool) -> None:
    """Before test modules are imported: whether this run is the whole."""
    global _whole
    _whole = whole


def examples(count: int) -> int:
    """Of so many cases that hypothesis makes in the whole run, how many it makes in this one."""
    return count if _whole else max(2, count // 4)
