"""Conditions of a snapshot, all of one kind checked at once.

Conditions that an object is in a place are compared together. For each kind of places a function
makes a `Read` of many of them, column by column: what is there now, and which objects should be.
Each other kind has a function that makes a check. Where something is no longer there, both may
raise `KeyError`, `IndexError`, `AttributeError` or `ValueError` instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import chain
from operator import contains, itemgetter
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt._compat.identity import identities
from graphopt.guards.values import kinds_of

Check = Callable[[], bool]
References = list[Callable[[], Any]]

_MATCHES = 3
"""The number of remembered states of the same tensors, such as with and without an update in
flight."""


class Referred(NamedTuple):
    """An object that should be in a place, and that the snapshot does not keep alive.

    Attributes:
        get: a weak reference to it.
    """

    get: Callable[[], Any]


class Read(NamedTuple):
    """Objects in many places.

    Attributes:
        now: reads them.
        known: the identities of the objects that should be there; None where one is gone.
    """

    now: Callable[[], Iterable[Any]]
    known: bytes | None


def all_found(reads: list[Read]) -> Check:
    """Makes a check that all objects are those that should be there."""
    if any(read.known is None for read in reads):
        return lambda: False
    known = b"".join(read.known or b"" for read in reads)
    now = [read.now for read in reads]
    return lambda: identities(chain.from_iterable([read() for read in now])) == known


def _items(containers: list[Any], keys: list[Any], values: list[Any]) -> Read:
    """Reads items of containers: all of one in one call."""
    of: dict[int, tuple[Any, list[Any], list[Any]]] = {}
    for container, key, value in zip(containers, keys, _objects(values), strict=True):
        _, its_keys, its_values = of.setdefault(id(container), (container, [], []))
        # Of a single key there would be no tuple.
        its_keys += [key] if its_keys else [key, key]
        its_values += [value] if its_values else [value, value]
    readers = [(itemgetter(*its_keys), container) for container, its_keys, _ in of.values()]
    known = identities(chain.from_iterable(its_values for _, _, its_values in of.values()))
    return Read(lambda: chain.from_iterable([read(each) for read, each in readers]), known)


def _lists(lists: list[list[Any]], items: list[tuple[Any, ...]]) -> Read:
    known = identities(chain.from_iterable(items))
    return Read(lambda: chain.from_iterable(map(list.__iter__, lists)), known)


def _tables(
    tables: list[dict[Any, Any]], keys: list[tuple[Any, ...]], values: list[tuple[Any, ...]]
) -> Read:
    def now() -> Iterable[Any]:
        names = chain.from_iterable(map(dict.keys, tables))
        return chain(names, chain.from_iterable(map(dict.values, tables)))

    return Read(now, identities(chain.from_iterable([*keys, *values])))


def _modules(tables: list[dict[str, Any]], bodies: list[list[Any]]) -> Read:
    """Reads the `__dict__` and class of modules."""

    def now() -> list[Any]:
        return gc.get_referents(*chain.from_iterable(map(dict.values, tables)))

    return Read(now, identities(chain.from_iterable(bodies)))


def _attributes(owners: list[Any], names: list[str], values: list[Any]) -> Read:
    return Read(lambda: map(getattr, owners, names), identities(_objects(values)))


def _attributes_of_held(holders: References, names: list[str], values: list[Any]) -> Read:
    known = identities(_objects(values))
    return Read(lambda: map(getattr, _targets(holders), names), known)


def _classes(holders: References, kinds: list[type]) -> Read:
    return Read(lambda: map(type, _targets(holders)), identities(kinds))


def _alive(references: References) -> Read:
    """Reads what weak references refer to."""
    targets = _targets(references)
    known = None if any(target is None for target in targets) else identities(targets)
    return Read(lambda: _targets(references), known)


def _targets(references: References) -> list[Any]:
    return [reference() for reference in references]


def _objects(values: list[Any]) -> list[Any]:
    """Returns the objects themselves that values are or refer to."""
    return [value.get() if type(value) is Referred else value for value in values]


def _empty(containers: list[Any]) -> Check:
    return lambda: not any(containers)


def _giving(function: Callable[..., Any]) -> Callable[..., Check]:
    """Makes a function that makes checks that `function` gives what is in the last column for what
    is in the others."""

    def check(*columns: list[Any]) -> Check:
        *given, expected = columns
        return lambda: list(map(function, *given)) == expected

    return check


def _of_kinds(tensors: list[torch.Tensor], *columns: list[Any]) -> Check:
    """Makes a check that tensors have these facts of `kinds_of`: by torch's code for that, after a
    look at each one."""
    matches: list[Callable[..., bool]] = []
    once = list({id(tensor): tensor for tensor in tensors}.values())

    def holds() -> bool:
        if any(match(*once) for match in matches):
            return True
        if kinds_of(tensors) != columns:
            return False
        match = _compat.metadata_match(once)
        if match is not None:
            matches.insert(0, match)
            del matches[_MATCHES:]
        return True

    return holds


def _custom(checks: list[Check]) -> Check:
    return lambda: all(check() for check in checks)


READS: dict[str, Callable[..., Read]] = {
    "contents": _tables,
    "items": _lists,
    "modules": _modules,
    "item": _items,
    "class": _classes,
    "attribute of": _attributes,
    "attribute": _attributes_of_held,
    "alive": _alive,
}
"""For each kind of places the function that reads many of them."""

CHECKS: dict[str, Callable[..., Check]] = {
    "empty": _empty,
    "length": _giving(len),
    "keys": _giving(tuple),
    "key": _giving(contains),
    "kind": _of_kinds,
    "hooks": _giving(_compat.hooks_of),
    "check": _custom,
}
"""For each other kind of conditions the function that makes a check of many of them."""
