"""Traversal of nested containers, which may be deep and contain themselves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]
"""Positions and keys that lead from `(args, kwargs)` to a container."""

_TABLES = frozenset({dict, OrderedDict, defaultdict})
_NESTS = frozenset({list, tuple, dict})


def parts(value: Any, is_nest: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields a value and everything nested in it.

    Args:
        is_nest: whether to go into a value. Of a dictionary these are the values.
    """
    seen, pending = set[int](), [value]
    while pending:
        each = pending.pop()
        if not is_nest(each):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            yield each
            pending.extend(each.values() if isinstance(each, dict) else each)


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists, tuples, dictionaries and slices with `change` applied to each
    leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([with_leaves(item, change) for item in value])
    if kind is dict:
        return {key: with_leaves(item, change) for key, item in value.items()}
    if kind is slice:
        return slice(*(with_leaves(b, change) for b in (value.start, value.stop, value.step)))
    return change(value)


def _is_plain_nest(value: Any) -> bool:
    return type(value) in _NESTS


def leaves_in(value: Any, is_nest: Callable[[Any], bool] = _is_plain_nest) -> Iterator[Any]:
    """Yields the leaves of nested values, by default of lists, tuples and dictionaries."""
    return (each for each in parts(value, is_nest) if not is_nest(each))


def containers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the lists and dictionaries nested in arguments, with their paths."""
    for position, value in enumerate(args):
        yield from _containers((0, position), value)
    for key, value in kwargs.items():
        yield from _containers((1, key), value)


def _containers(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if type(value) is list or type(value) in _TABLES:
        yield path, value
    if type(value) in _TABLES:
        for key, item in value.items():
            yield from _containers((*path, key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _containers((*path, index), item)
