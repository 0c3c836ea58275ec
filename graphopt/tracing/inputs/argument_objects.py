"""Argument objects that hold tensors or arrays, such as batches of a user's class.

    def step(model, batch): … model(batch.x) … batch["y"] … batch.to(device)

They are taken apart as lists and dictionaries are: tensors, arrays and numbers in them are inputs,
found by their path in each call, and what the step leaves in them each call leaves in its own. What
else the step reads of them is found again by the guard of what it reads outside (`guards.outside`),
which gets to the object by a place in a list that holds those of the call.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt.tracing.effects.tuples import TupleTable, is_tensor_or_plain, leaves_of
from graphopt.tracing.outside.held import is_plain_class
from graphopt.tracing.outside.places import OutsidePlace, attributes_of
from graphopt.tracing.scalars.host_numbers import EXACT
from graphopt.tracing.tensors.classes import special_class

_TABLES = frozenset({dict, OrderedDict, defaultdict})
_LAYOUTS = (torch.strided, torch.sparse_coo)
_PLAIN = frozenset({int, float, bool, str, type(None)})
_FEW = 200
_DEPTH = 8


class AttributesOf:
    """A path element that leads from an object to its `__dict__`."""

    def __repr__(self) -> str:
        return "AttributesOf"


ATTRIBUTES = AttributesOf()


class GivenTable(NamedTuple):
    """A dictionary or list inside an argument object, or its `__dict__`.

    Attributes:
        root: the position of the object among the leaves of the arguments.
        path: from the object to it.
    """

    root: int
    path: tuple[Any, ...]
    table: Any


class GivenField(NamedTuple):
    """A tensor, array or number inside an argument object."""

    table: GivenTable
    key: Any
    value: Any

    @property
    def place(self) -> OutsidePlace:
        """The place that holds the field."""
        return OutsidePlace("item", self.table.table, self.key)

    def name(self, root: str) -> str:
        """The field's name in messages, given the name of the object."""
        steps = [*self.table.path, self.key]
        attribute = False
        for step in steps:
            if not isinstance(step, AttributesOf):
                root += f".{step}" if attribute else f"[{step!r}]"
            attribute = isinstance(step, AttributesOf)
        return root


class OpenedObjects:
    """The argument objects of one call that are flattened to their fields.

    Args:
        leaves: of the arguments.
        positions: of those that are no tensors, modules or optimizers.

    Attributes:
        roots: the positions of the objects.
        tables, fields: what is in them.
        found: the objects, and the objects and tables in them, each with its root and the path from
            there.
        structure: where that is, of which type each object is, and which are the same.
    """

    def __init__(self, leaves: Sequence[Any] = (), positions: Sequence[int] = ()) -> None:
        self.roots: list[int] = []
        self.tables: list[GivenTable] = []
        self.fields: list[GivenField] = []
        self.found: list[tuple[Any, int, tuple[Any, ...]]] = []
        self.structure: list[Any] = []
        self._known: dict[int, Any] = {}
        for position in positions:
            value = leaves[position]
            if may_be_taken_apart(type(value)) and _may_hold_tensors(attributes_of(value) or {}):
                self._take(value, position)

    def __bool__(self) -> bool:
        return bool(self.roots)

    def _take(self, value: Any, position: int) -> None:
        walk = _ObjectWalk(position, self._known)
        taken = walk.of_object(value, ())
        if not taken or not (id(value) in self._known or walk.has_tensors()):
            return
        self.roots.append(position)
        self.tables += walk.tables
        self.fields += walk.fields
        self.found += walk.found
        self.structure += walk.structure
        self._known.update(walk.known)

    def contains(self, holder: Any) -> bool:
        """True if `holder` is a table of one of the objects."""
        return any(each.table is holder for each in self.tables)


class _ObjectWalk:
    """A walk through one argument object that collects its tables and fields.

    Args:
        known: where objects and tables are that have been taken apart before, by id.
    """

    def __init__(self, root: int, known: dict[int, Any]) -> None:
        self._root, self._before, self.known = root, known, dict[int, Any]()
        self.tables: list[GivenTable] = []
        self.fields: list[GivenField] = []
        self.found: list[tuple[Any, int, tuple[Any, ...]]] = []
        self.structure: list[Any] = []
        self._left = _FEW

    def has_tensors(self) -> bool:
        """True if the object holds tensors or arrays, not only numbers."""
        return any(_is_tensor_or_array(field.value) for field in self.fields)

    def of_object(self, value: Any, path: tuple[Any, ...]) -> bool:
        """Collects the fields of an object; False if it holds something that batches do not."""
        attributes = attributes_of(value)
        if attributes is None or self._is_known(value, path):
            return True
        return self._of_table(attributes, (*path, ATTRIBUTES))

    def _is_known(self, value: Any, path: tuple[Any, ...]) -> bool:
        """True if an object or table was met before; records the first place of each."""
        first = self.known.get(id(value), self._before.get(id(value)))
        if first is None:
            self.known[id(value)] = self._root, path
            self.found.append((value, self._root, path))
        self.structure.append((self._root, path, type(value), first))
        return first is not None

    def _of_table(self, table: Any, path: tuple[Any, ...]) -> bool:
        if self._is_known(table, path):
            return True
        self._left -= len(table)
        if self._left < 0:
            return False
        items = list(table.items() if isinstance(table, dict) else enumerate(table))
        if not all(type(key) in (str, int) for key, _ in items):
            return False
        if type(table) is list:
            self.structure.append((self._root, path, len(table)))
        given = GivenTable(self._root, path, table)
        self.tables.append(given)
        return all(self._of_item(given, key, value) for key, value in items)

    def _of_item(self, table: GivenTable, key: Any, value: Any) -> bool:
        if isinstance(value, (nn.Module, Optimizer)):
            return False
        if _is_field(value, table.table):
            self.fields.append(GivenField(table, key, value))
            kind = torch.Tensor if isinstance(value, torch.Tensor) else type(value)
            self.structure.append((self._root, table.path, key, kind))
            return True
        path = (*table.path, key)
        if isinstance(value, tuple) and (found := leaves_of(value, is_tensor_or_plain)) is not None:
            self._of_tuple(table, key, *found)
            return True
        if isinstance(value, torch.Tensor) or len(path) > _DEPTH:
            return True
        if type(value) is list and not _may_hold_tensors(value):
            return True  # it is as one outside
        if type(value) in _TABLES or type(value) is list:
            return self._of_table(value, path)
        return not may_be_taken_apart(type(value)) or self.of_object(value, path)

    def _of_tuple(self, table: GivenTable, key: Any, leaves: Sequence[Any], spec: Any) -> None:
        within = TupleTable(OutsidePlace("item", table.table, key), spec, is_tensor_or_plain)
        given = GivenTable(self._root, (*table.path, key), within)
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if all(_is_field(leaf, within) for _, leaf in tensors):
            self.structure.append((self._root, given.path, spec, [at for at, _ in tensors]))
            self.fields += [GivenField(given, at, leaf) for at, leaf in tensors]


def _may_hold_tensors(table: Any) -> bool:
    """True if a table may hold tensors or arrays; a quick test, since most hold none."""
    pending, seen, left = [table], {id(table)}, _FEW
    while pending:
        each = pending.pop()
        left -= len(each)
        if left < 0:
            return False
        for value in each.values() if isinstance(each, dict) else each:
            kind = type(value)
            if kind in _PLAIN:
                continue
            if _is_tensor_or_array(value):
                return True
            nest = kind in _TABLES or kind is list or isinstance(value, tuple)
            inner = value if nest else None
            if inner is None and may_be_taken_apart(kind):
                inner = attributes_of(value)
            if inner and id(inner) not in seen:
                seen.add(id(inner))
                pending.append(inner)
    return False


def _is_field(value: Any, table: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if special_class(value) is not None or value.is_nested or value.layout not in _LAYOUTS:
            return False
        return not value.is_leaf or value.grad is None or value.grad.grad_fn is None
    if _is_array(value):
        return True
    if isinstance(table, list):
        return False
    return type(value) is float or (type(value) is int and abs(value) < EXACT)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_tensor_or_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_array(value)


def may_be_taken_apart(kind: type) -> bool:
    """True if objects of a class consist of their attributes alone."""
    found = _known_kinds.get(kind)
    if found is None:
        found = _known_kinds[kind] = _is_of_attributes(kind)
    return found


_known_kinds: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _is_of_attributes(kind: type) -> bool:
    if kind.__module__ in ("builtins", "numpy") or issubclass(kind, (type, tuple)):
        return False
    if issubclass(kind, (torch.Tensor, nn.Module, Optimizer)) or not kind.__dictoffset__:
        return False
    return kind is types.SimpleNamespace or is_plain_class(kind)
