"""Snapshots of very many objects, compared at once before each call of a step.

    what there was                      how it is compared with what is there
    ─────────────────────────────────   ────────────────────────────────────────────────────────────
    all that is in dictionaries         by the dictionaries' versions (`versions.py`)
    whole lists, dictionaries that vary as one flat list (`containers.py`)
    items, attributes, classes          one by one, without a Python function for any of them
    shapes, dtypes, … of tensors        by the C++ code that torch.compile has for that
    containers in which there is nothing  whether there is

Objects are compared by identity: no `__eq__` of the program's is called, `1` is not `True`, and
`0.0` is not `-0.0`. That an equal value stands in a place is for a guard to find out, which looks
at its own things one by one where something here differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, compress
from operator import contains, getitem
from types import CellType
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt._compat.identity import identities
from graphopt.guards.containers import (
    Container,
    NotedContainer,
    NotedModules,
    WholeContainers,
    WholeModules,
)
from graphopt.guards.values import is_plain, kinds_of
from graphopt.guards.versions import Versions

_ON_CONTENTS = (
    ("_containers", "_keys", "_values"),
    ("_referring", "_referred", "_references"),
    ("_asked", "_asked_keys", "_there"),
    ("_sized", "_sizes"),
)
"""Conditions on what is in containers, column by column; the first has the containers."""

Body = tuple[type, dict[str, Any]] | None

_MATCHES = 3
"""The number of remembered states of the same tensors, such as with and without an update in
flight."""


class StateSnapshot:
    """A snapshot of values at many places, for comparison with the present ones.

    Keeps alive the containers, and what `has` is told of, until it is told to `forget`. All
    conditions are added before `holds` is asked for the first time.
    """

    def __init__(self) -> None:
        self._joined: StateSnapshot | None = None
        self._versions: Versions | None = None
        self._rest: StateSnapshot | None = None
        self._whole: tuple[WholeContainers, WholeModules] | None = None
        self._matches: tuple[Callable[[], bool], ...] = ()
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._references: list[Callable[[], Any]] = []
        self._referring: list[Any] = []
        self._referred: list[Any] = []
        self._noted: list[NotedContainer] = []
        self._noted_modules: list[NotedModules] = []
        self._empty: list[Any] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._named: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self._tensors: list[torch.Tensor] = []
        self._kinds: list[Any] = []
        self._strides: list[Any] = []
        self._classes: list[type | None] = []
        self._hooks: list[tuple[int, ...]] = []
        self._asked: list[Any] = []
        self._asked_keys: list[Any] = []
        self._there: list[bool] = []
        self._typed: list[Callable[[], Any]] = []
        self._types: list[type] = []
        self._cells: list[CellType] = []
        self._cell_values: list[Any] = []
        self._referring_cells: list[CellType] = []
        self._cell_references: list[Callable[[], Any]] = []
        self._owners: list[Any] = []
        self._owned_names: list[str] = []
        self._owned_values: list[Any] = []
        self._referring_owners: list[Any] = []
        self._owned_references: list[Callable[[], Any]] = []
        self._names_of_references: list[str] = []
        self._holders: list[Callable[[], Any]] = []
        self._attribute_names: list[str] = []
        self._attribute_values: list[Any] = []
        self._referring_holders: list[Callable[[], Any]] = []
        self._referred_names: list[str] = []
        self._referred_values: list[Callable[[], Any]] = []
        self._checks: list[Callable[[], bool]] = []

    @classmethod
    def joined(cls, parts: Iterable[StateSnapshot]) -> StateSnapshot:
        """Joins several snapshots into one, which is forgotten as soon as one of them is."""
        new = cls()
        for part in parts:
            part._joined = new
            for mine, more in zip(new._lists(), part._lists(), strict=True):
                mine += more
        return new

    def _lists(self) -> Iterator[list[Any]]:
        return (each for each in vars(self).values() if isinstance(each, list))

    def forget(self) -> None:
        """Drops all references; from then on `holds` is False."""
        self._whole, self._matches, self._versions, self._rest = None, (), None, None
        for each in self._lists():
            each.clear()
        self._checks.append(_never)
        if self._joined is not None:
            self._joined.forget()

    def has(self, container: Any, key: Any, value: object) -> None:
        """Adds a condition: `value` is at `key`."""
        self._containers.append(container)
        self._keys.append(key)
        self._values.append(value)

    def has_object(self, container: Container, key: Any, value: object) -> None:
        """Adds a condition: `value` is at `key`. It is kept alive only if it is plain or not weakly
        referable."""
        if not is_plain(value):
            try:
                self.has_referred(container, key, weakref.ref(value))
            except TypeError:
                pass
            else:
                return
        self.has(container, key, value)

    def has_referred(self, container: Any, key: Any, reference: Callable[[], Any]) -> None:
        """Adds a condition: the target of `reference` is at `key`."""
        self._referring.append(container)
        self._referred.append(key)
        self._references.append(reference)

    def has_key(self, container: Any, key: Any, there: bool) -> None:
        """Adds a condition: `key` is present, or absent."""
        self._asked.append(container)
        self._asked_keys.append(key)
        self._there.append(there)

    def has_class(self, holder: Callable[[], Any], kind: type) -> None:
        """Adds a condition: the object that `holder` returns has exactly this class."""
        self._typed.append(holder)
        self._types.append(kind)

    def has_cell(self, cell: CellType, value: object) -> None:
        """Adds a condition: a closure variable holds `value`."""
        self._cells.append(cell)
        self._cell_values.append(value)

    def has_cell_referred(self, cell: CellType, reference: Callable[[], Any]) -> None:
        """Adds a condition: a closure variable holds the target of `reference`."""
        self._referring_cells.append(cell)
        self._cell_references.append(reference)

    def has_attribute_of(self, owner: object, name: str, value: object) -> None:
        """Adds a condition: an object without weak references has `value` as an attribute."""
        self._owners.append(owner)
        self._owned_names.append(name)
        self._owned_values.append(value)

    def has_attribute_of_referred(
        self, owner: object, name: str, reference: Callable[[], Any]
    ) -> None:
        """Adds a condition: an object without weak references has the target of `reference` as an
        attribute."""
        self._referring_owners.append(owner)
        self._names_of_references.append(name)
        self._owned_references.append(reference)

    def has_attribute(self, holder: Callable[[], Any], name: str, value: object) -> None:
        """Adds a condition: the object that `holder` returns has `value` as an attribute."""
        self._holders.append(holder)
        self._attribute_names.append(name)
        self._attribute_values.append(value)

    def has_attribute_referred(
        self, holder: Callable[[], Any], name: str, reference: Callable[[], Any]
    ) -> None:
        """Adds a condition: the object that `holder` returns has the target of `reference` as an
        attribute."""
        self._referring_holders.append(holder)
        self._referred_names.append(name)
        self._referred_values.append(reference)

    def also(self, check: Callable[[], bool]) -> None:
        """Adds a custom condition."""
        self._checks.append(check)

    def has_objects(self, table: dict[Any, Any]) -> None:
        """Adds conditions: the table has these keys, and `has_object` of each."""
        self.has_keys(table)
        for key, value in table.items():
            self.has_object(table, key, value)

    def has_items(self, container: Container) -> None:
        """Adds a condition: the container has exactly its present items."""
        if container:
            self._noted.append(NotedContainer.of(container))
        else:
            self._empty.append(container)

    def has_size(self, container: Sized) -> None:
        """Adds a condition: the container has its present length."""
        self.has_length(container, len(container))

    def has_length(self, container: Sized, length: int) -> None:
        """Adds a condition: the container has this length."""
        self._sized.append(container)
        self._sizes.append(length)

    def has_keys(self, table: dict[Any, Any]) -> None:
        """Adds a condition: the table has its present keys, with any values, which are not kept
        alive."""
        if not table:
            self._empty.append(table)
            return
        self.has_size(table)
        self._named.append((table, tuple(table)))

    def has_modules(self, table: dict[str, Any]) -> None:
        """Adds a condition: the table has exactly its present modules, which are not kept alive."""
        if table:
            self._noted_modules.append(NotedModules.of(table))
        else:
            self._empty.append(table)

    def has_kind(self, tensor: torch.Tensor) -> None:
        """Adds a condition: the tensor has its present kind and gradient hooks."""
        self._tensors.append(tensor)
        for column, facts in zip(self._columns(), kinds_of([tensor]), strict=True):
            column += facts
        self._hooks.append(_compat.hooks_of(tensor))

    def holds(self) -> bool:
        """True if all conditions hold."""
        try:
            if self._versions is None or self._rest is None:
                self._versions = Versions(self._in_containers())
                self._rest = self._without(self._versions)
            now = self._versions.now()
            if now == self._versions.known:
                return self._rest._all_hold()
            if not self._all_hold():
                return False
            if self._versions.note(now):
                self._rest = self._without(self._versions)
        except (
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
        ):  # something is no longer where it was
            return False
        return True

    def _in_containers(self) -> Iterator[Any]:
        """Yields the containers whose contents there are conditions on."""
        yield from chain(self._containers, self._referring, self._asked, self._sized)
        yield from (noted.container for noted in self._noted)
        yield from (table for table, _ in self._named)

    def _without(self, versions: Versions) -> StateSnapshot:
        """Returns the conditions that the versions of dictionaries do not show to hold."""
        rest = StateSnapshot()
        vars(rest).update((name, each) for name, each in vars(self).items() if type(each) is list)
        for names in _ON_CONTENTS:
            columns = [getattr(self, name) for name in names]
            kept = [not versions.tell_of(container) for container in columns[0]]
            for name, column in zip(names, columns, strict=True):
                setattr(rest, name, list(compress(column, kept)))
        rest._noted = [each for each in self._noted if not versions.tell_of(each.container)]
        rest._named = [each for each in self._named if not versions.tell_of(each[0])]
        return rest

    def _all_hold(self) -> bool:
        """True if all conditions hold, each of which is looked at."""
        items = map(getitem, self._containers, self._keys)
        return (
            not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and self._same_contents()
            and identities(items) == identities(self._values)
            and (not self._references or self._same_objects())
            and (not self._named or all(tuple(table) == keys for table, keys in self._named))
            and (not self._tensors or self._same_tensors())
            and list(map(contains, self._asked, self._asked_keys)) == self._there
            and (not self._typed or [type(of()) for of in self._typed] == self._types)
            and self._same_cells()
            and self._same_owned()
            and (not self._holders or self._same_attributes())
            and (not self._referring_holders or self._same_referred())
            and all(check() for check in self._checks)
        )

    def _same_contents(self) -> bool:
        if self._whole is None:
            self._whole = WholeContainers(self._noted), WholeModules(self._noted_modules)
        containers, modules = self._whole
        return containers.hold() and modules.hold()

    def _same_objects(self) -> bool:
        now = map(getitem, self._referring, self._referred)
        return identities(now) == identities([reference() for reference in self._references])

    def _columns(self) -> tuple[list[Any], ...]:
        """Returns the facts about tensors in the order of `kinds_of`."""
        return self._kinds, self._strides, self._classes

    def _same_tensors(self) -> bool:
        if any(match() for match in self._matches):
            return True
        if kinds_of(self._tensors) != self._columns():
            return False
        if list(map(_compat.hooks_of, self._tensors)) != self._hooks:
            return False
        match = _compat.metadata_match(self._tensors)
        if match is not None:
            self._matches = (match, *self._matches[: _MATCHES - 1])
        return True

    def _same_cells(self) -> bool:
        now = [cell.cell_contents for cell in chain(self._cells, self._referring_cells)]
        referred = [reference() for reference in self._cell_references]
        return identities(now) == identities(chain(self._cell_values, referred))

    def _same_owned(self) -> bool:
        now = map(getattr, self._owners, self._owned_names)
        others = map(getattr, self._referring_owners, self._names_of_references)
        referred = [reference() for reference in self._owned_references]
        return identities(chain(now, others)) == identities(chain(self._owned_values, referred))

    def _same_attributes(self) -> bool:
        now = map(getattr, [of() for of in self._holders], self._attribute_names)
        return identities(now) == identities(self._attribute_values)

    def _same_referred(self) -> bool:
        now = map(getattr, [of() for of in self._referring_holders], self._referred_names)
        return identities(now) == identities([of() for of in self._referred_values])


def _never() -> bool:
    return False


def body_of(module: nn.Module | None) -> Body:
    """Returns a module's class and `__dict__`, which identify it without keeping it alive."""
    return None if module is None else (type(module), vars(module))


def is_body(module: nn.Module | None, body: Body) -> bool:
    """True if a module has this class and this `__dict__` object."""
    if module is None or body is None:
        return module is None and body is None
    return type(module) is body[0] and vars(module) is body[1]
