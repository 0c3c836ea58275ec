"""The contents of mutable objects, read, compared and restored: one row per kind of object.

Containers are compared by the identity of what is in them, numbers and strings by value. Methods of
the builtin classes are called as such, so that no code of a user's subclass runs.
"""

from __future__ import annotations

import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import eq, is_
from types import CellType
from typing import Any

import torch

from graphopt.guards.values import same_constant
from graphopt.tracing.rollback.generators import read_state, same_states, write_state

_MISSING: Any = object()


@dataclass(frozen=True)
class ObjectKind:
    """The functions that read, restore and compare objects of one kind.

    Attributes:
        read: returns an object's content, in a form that later changes do not touch.
        write: makes an object hold what was read.
        same: tells whether two contents are one.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool]


def _identical(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """True if two sequences hold the same objects, or equal numbers and strings."""
    if len(now) != len(before):
        return False
    return all(map(is_, now, before)) or all(map(same_constant, now, before))


def _read_table(table: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    return list(kind.keys(table)), list(kind.values(table))


def _same_tables(now: tuple[list[Any], list[Any]], before: tuple[list[Any], list[Any]]) -> bool:
    return all(map(_identical, now, before))


def _write_table(table: dict[Any, Any], content: tuple[list[Any], list[Any]]) -> None:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    kind.clear(table)
    for key, value in zip(*content, strict=True):
        kind.__setitem__(table, key, value)


def _filling(kind: Any, fill: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A function that writes items to a container of this kind in place of what is in it."""

    def write(container: Any, items: Iterable[Any]) -> None:
        kind.clear(container)
        fill(container, items)

    return write


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the variable has no value yet
        return _MISSING


def _write_cell(cell: CellType, content: Any) -> None:
    if content is not _MISSING:
        cell.cell_contents = content
    else:
        del cell.cell_contents  # nothing happens where there is no value


@dataclass(frozen=True)
class NamespacePart:
    """Part of a namespace: the globals that a function reads, attributes of a class, or an object's
    slots.

    Attributes:
        owner: the namespace, the class or the object.
        get, set, drop: of one name; `get` takes what stands for a missing value.
    """

    owner: Any
    names: tuple[str, ...]
    get: Callable[[str, Any], Any]
    set: Callable[[str, Any], None]
    drop: Callable[[str], None]

    def differing(self, before: list[Any], after: list[Any]) -> str:
        """The names of the namespace whose values differ between two states."""
        pairs = zip(self.names, before, after, strict=True)
        return ", ".join(name for name, a, b in pairs if not same_constant(a, b))


def _read_names(some: NamespacePart) -> list[Any]:
    return [some.get(name, _MISSING) for name in some.names]


def _write_names(some: NamespacePart, content: list[Any]) -> None:
    for name, now, value in zip(some.names, _read_names(some), content, strict=True):
        if now is value:
            continue
        if value is _MISSING:
            some.drop(name)
        else:
            some.set(name, value)


def _write_slice(now: Any, content: Any) -> None:
    now[:] = content


def _write_numbers(now: array.array[Any], content: tuple[str, bytes]) -> None:
    now[:] = array.array(*content)


def _same_arrays(now: Any, before: Any) -> bool:
    return (now.dtype, now.tobytes()) == (before.dtype, before.tobytes())


def _write_array(now: Any, content: Any) -> None:
    now[...] = content


def _read_modes(_: Any) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


def _write_modes(_: Any, content: tuple[Any, ...]) -> None:
    gradients, dtype, deterministic, warn_only, *autocast = content
    torch.set_grad_enabled(gradients)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    for device, (enabled, precision) in zip(("cpu", "cuda"), autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, precision)


TABLE = ObjectKind(_read_table, _write_table, _same_tables)
LIST = ObjectKind(list.copy, _filling(list, list.extend), _identical)
QUEUE = ObjectKind(list, _filling(deque, deque.extend), _identical)
SET = ObjectKind(frozenset, _filling(set, set.update), eq)
CELL = ObjectKind(_read_cell, _write_cell, same_constant)
NAMES = ObjectKind(_read_names, _write_names, _identical)
BYTES = ObjectKind(bytes, _write_slice, eq)
NUMBERS = ObjectKind(lambda n: (n.typecode, n.tobytes()), _write_numbers, eq)
ARRAY = ObjectKind(lambda array: array.copy(), _write_array, _same_arrays)
GENERATOR = ObjectKind(read_state, write_state, same_states)
MODES = ObjectKind(_read_modes, _write_modes, eq)


@contextmanager
def containers_kept(containers: Iterable[Any]) -> Iterator[None]:
    """While active, changes to the dictionaries and lists among these are temporary."""
    known = [(TABLE if isinstance(c, dict) else LIST, c) for c in containers if _is_kept(c)]
    before = [(kind, container, kind.read(container)) for kind, container in known]
    try:
        yield
    finally:
        for kind, container, content in before:
            kind.write(container, content)


def _is_kept(container: object) -> bool:
    return isinstance(container, (dict, list))
