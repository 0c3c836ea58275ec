"""Whether very many objects are still the same, in few steps of the interpreter.

Guards are asked before every call of a step. To say in detail how something has changed they take
microseconds for each module and parameter; this takes tens of nanoseconds for each object.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt.tracing.guard_values import is_plain, kinds_of

Container = dict[Any, Any] | list[Any]
Body = tuple[type, dict[str, Any]] | None


class StateSnapshot:
    """What was there, to be compared with what is there.

    Keeps alive the containers, and what `has` is told of.
    """

    def __init__(self) -> None:
        self._containers: list[Container] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._references: list[weakref.ref[Any]] = []
        self._referring: list[Container] = []
        self._referred: list[Any] = []
        self._ordered: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._sized: list[Container] = []
        self._sizes: list[int] = []
        self._tables: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._classes: list[type] = []
        self._attributes: list[dict[str, Any] | None] = []
        self._named: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self._tensors: list[torch.Tensor] = []
        self._kinds: tuple[list[Any], ...] = ([], [])
        self._hooks: list[tuple[int, ...]] = []

    def has(self, container: Container, key: Any, value: object) -> None:
        """`value` is at `key`."""
        self._containers.append(container)
        self._keys.append(key)
        self._values.append(value)

    def has_object(self, container: Container, key: Any, value: object) -> None:
        """`value` is at `key`; it is kept alive only where it is plain, or has no references."""
        if not is_plain(value):
            try:
                self._references.append(weakref.ref(value))
            except TypeError:
                pass
            else:
                self._referring.append(container)
                self._referred.append(key)
                return
        self.has(container, key, value)

    def has_objects(self, table: dict[Any, Any]) -> None:
        """The table has these keys, and `has_object` of each."""
        self.has_keys(table)
        for key, value in table.items():
            self.has_object(table, key, value)

    def has_items(self, container: Container) -> None:
        """The container has these items, and no others."""
        if isinstance(container, dict) and any(isinstance(key, torch.Tensor) for key in container):
            # torch hashes tensors in Python: their order is looked at instead
            self._ordered.append((container, list(container), list(container.values())))
            return
        pairs: Iterable[tuple[Any, Any]] = (
            container.items() if isinstance(container, dict) else enumerate(container)
        )
        for key, value in pairs:
            self.has(container, key, value)
        self.has_size(container)

    def has_size(self, container: Container) -> None:
        """The container has so many items."""
        self._sized.append(container)
        self._sizes.append(len(container))

    def has_keys(self, table: dict[Any, Any]) -> None:
        """The table has these keys; what is there does not matter, and is not kept alive."""
        self.has_size(table)
        if table:
            self._named.append((table, tuple(table)))

    def has_module(self, table: dict[str, Any], key: str) -> None:
        """This module, or None, is at `key`; the module is not kept alive."""
        module = table[key]
        self._tables.append(table)
        self._names.append(key)
        self._classes.append(type(module))
        self._attributes.append(_attributes_of(module))

    def has_kind(self, tensor: torch.Tensor) -> None:
        """The tensor is of this kind, and has these gradient hooks."""
        self._tensors.append(tensor)
        for known, kind in zip(self._kinds, kinds_of([tensor]), strict=True):
            known += kind
        self._hooks.append(_compat.hooks_of(tensor))

    def holds(self) -> bool:
        """Whether all that is so."""
        try:
            now = map(getitem, self._containers, self._keys)
            return (
                list(map(len, self._sized)) == self._sizes
                and all(map(is_, now, self._values))
                and (not self._references or self._same_objects())
                and (not self._ordered or self._same_order())
                and (not self._named or all(tuple(table) == keys for table, keys in self._named))
                and (not self._tables or self._same_modules())
                and (not self._tensors or self._same_tensors())
            )
        except (KeyError, IndexError):  # something is no longer where it was
            return False

    def _same_order(self) -> bool:
        return all(
            len(table) == len(keys)
            and all(map(is_, table, keys))
            and all(map(is_, table.values(), values))
            for table, keys, values in self._ordered
        )

    def _same_objects(self) -> bool:
        now = map(getitem, self._referring, self._referred)
        return all(map(is_, now, [reference() for reference in self._references]))

    def _same_modules(self) -> bool:
        now = list(map(getitem, self._tables, self._names))
        if list(map(type, now)) != self._classes:
            return False
        return all(map(is_, map(_attributes_of, now), self._attributes))

    def _same_tensors(self) -> bool:
        if kinds_of(self._tensors) != self._kinds:
            return False
        if any(chain.from_iterable(map(_compat.hook_tables, self._tensors))):
            return list(map(_compat.hooks_of, self._tensors)) == self._hooks
        return not any(self._hooks)


def body_of(module: nn.Module | None) -> Body:
    """What a module is without its name: its class and its attributes, which are the same objects
    as long as it is the same module. They do not keep the module alive."""
    return None if module is None else (type(module), vars(module))


def _attributes_of(module: nn.Module | None) -> dict[str, Any] | None:
    return getattr(module, "__dict__", None)


def is_body(module: nn.Module | None, body: Body) -> bool:
    """Whether a module has this class, and these very attributes."""
    if module is None or body is None:
        return module is None and body is None
    return type(module) is body[0] and vars(module) is body[1]
