"""Versions of dictionaries: numbers that change with every change of the contents.

CPython up to 3.11 counts them; from 3.12 on torch does, which watches dictionaries. It is not told
when an empty dictionary takes over the contents of another one, and CPython 3.13.0 does not tell it
of attributes that are set: no version is trusted there.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from torch._C._dynamo import guards

table_version: Callable[[dict[Any, Any]], int] = guards.dict_version
"""The version of a dictionary, in 40 ns."""


def versioned_table(container: object) -> dict[Any, Any] | None:
    """Returns the dictionary whose version tells of changes to a container: itself, or the one
    behind a class's `__dict__`. None if no version tells of them, or as long as it is empty."""
    table = container
    if type(container) is MappingProxyType:
        (table,) = gc.get_referents(container)
    return table if _TELL and type(table) is dict and table else None


class _Changed:
    """A class whose attributes and those of its objects change, to see that versions tell."""

    mark = 0


def _store(owner: object, value: object) -> None:
    owner.mark = value  # type: ignore[attr-defined]


_CALLS_OF_HOT = 100
"""The number of calls after which CPython runs an instruction that is specialized for `_store`."""


def _versions_of_changes() -> Iterator[tuple[int, int]]:
    """Yields the versions of dictionaries before and after changes of each kind."""
    owner = _Changed()
    table: dict[str, Any] = dict.fromkeys("abc", 0)
    of_class = gc.get_referents(vars(_Changed))[0]
    changes: list[tuple[dict[Any, Any], Callable[[], Any]]] = [
        *[(vars(owner), lambda: _store(owner, object()))] * _CALLS_OF_HOT,
        (vars(owner), lambda: setattr(owner, "mark", object())),
        (vars(owner), lambda: delattr(owner, "mark")),
        (of_class, lambda: setattr(_Changed, "mark", object())),
        (table, lambda: table.update(a=object())),
        (table, lambda: table.__setitem__("d", 1)),
        (table, lambda: table.setdefault("e", 1)),
        (table, lambda: table.pop("a")),
        (table, table.popitem),
        (table, table.clear),
    ]
    for changed, change in changes:
        before = table_version(changed)
        change()
        yield before, table_version(changed)


_TELL = all(before != after for before, after in _versions_of_changes())
