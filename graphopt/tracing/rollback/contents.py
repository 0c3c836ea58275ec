"""The contents of mutable objects, read, compared and restored: one row per kind of object.

Containers are compared by the identity of what is in them, numbers and strings by value. Methods of
the builtin classes are called as such, so that no code of a user's subclass runs.
"""

from __future__ import annotations

import array
import itertools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import is_
from types import CellType
from typing import Any

import torch

from graphopt.guards.values import same_constant

_MISSING: Any = object()


@dataclass(frozen=True)
class ObjectKind:
    """The functions that read, compare and restore objects of one kind.

    Attributes:
        read: returns an object's content, in a form that later changes do not touch.
        same: tells whether an object still holds the content that was read.
        write: makes an object hold what was read.
    """

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]


def _identical(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """True if two iterables of one length hold the same objects, or equal numbers and strings."""
    pairs = itertools.tee(zip(now, before, strict=True))
    return all(itertools.starmap(is_, pairs[0])) or all(itertools.starmap(same_constant, pairs[1]))


def _read_table(table: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    return list(kind.keys(table)), list(kind.values(table))


def _same_table(table: dict[Any, Any], before: tuple[list[Any], list[Any]]) -> bool:
    keys, values = before
    if len(keys) != dict.__len__(table):
        return False
    now = _read_table(table)
    return _identical(now[0], keys) and _identical(now[1], values)


def _write_table(table: dict[Any, Any], content: tuple[list[Any], list[Any]]) -> None:
    kind = OrderedDict if isinstance(table, OrderedDict) else dict
    kind.clear(table)
    for key, value in zip(*content, strict=True):
        kind.__setitem__(table, key, value)


def _same_items(now: list[Any] | deque[Any], before: list[Any]) -> bool:
    kind: Any = list if isinstance(now, list) else deque
    return kind.__len__(now) == len(before) and _identical(kind.__iter__(now), before)


def _write_list(now: list[Any], content: list[Any]) -> None:
    list.__setitem__(now, slice(None), content)


def _write_queue(now: deque[Any], content: list[Any]) -> None:
    deque.clear(now)
    deque.extend(now, content)


def _same_set(now: set[Any], before: frozenset[Any]) -> bool:
    return set.__len__(now) == len(before) and set.__eq__(now, before) is True


def _write_set(now: set[Any], content: frozenset[Any]) -> None:
    set.clear(now)
    set.update(now, content)


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the variable has no value yet
        return _MISSING


def _same_cell(cell: CellType, before: Any) -> bool:
    return same_constant(_read_cell(cell), before)


def _write_cell(cell: CellType, content: Any) -> None:
    if content is not _MISSING:
        cell.cell_contents = content
    elif _read_cell(cell) is not _MISSING:
        del cell.cell_contents


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


def _same_names(some: NamespacePart, before: list[Any]) -> bool:
    return _identical(_read_names(some), before)


def _write_names(some: NamespacePart, content: list[Any]) -> None:
    for name, now, value in zip(some.names, _read_names(some), content, strict=True):
        if now is value:
            continue
        if value is _MISSING:
            some.drop(name)
        else:
            some.set(name, value)


def _same_bytes(now: bytearray, before: bytes) -> bool:
    return now == before


def _write_bytes(now: bytearray, content: bytes) -> None:
    now[:] = content


def _write_numbers(now: array.array[Any], content: tuple[str, bytes]) -> None:
    now[:] = array.array(*content)


def _same_array(now: Any, before: Any) -> bool:
    return (now.dtype, now.tobytes()) == (before.dtype, before.tobytes())


def _write_array(now: Any, content: Any) -> None:
    now[...] = content


def _read_generator(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def _same_generator(generator: Any, before: Any) -> bool:
    return bool(_comparable(_read_generator(generator)) == _comparable(before))


def _write_generator(generator: Any, content: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(content)
    elif hasattr(generator, "set_state"):
        generator.set_state(content)
    else:
        getattr(generator, "bit_generator", generator).state = content


def _comparable(state: Any) -> Any:
    """A generator's state without arrays, so that it can be compared."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    return state.tolist() if hasattr(state, "tolist") else state


def _read_modes(_: Any) -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


def _same_modes(_: Any, before: tuple[Any, ...]) -> bool:
    return _read_modes(None) == before


def _write_modes(_: Any, content: tuple[Any, ...]) -> None:
    gradients, dtype, deterministic, warn_only, *autocast = content
    torch.set_grad_enabled(gradients)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    for device, (enabled, precision) in zip(("cpu", "cuda"), autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, precision)


TABLE = ObjectKind(_read_table, _same_table, _write_table)
LIST = ObjectKind(list.copy, _same_items, _write_list)
QUEUE = ObjectKind(list, _same_items, _write_queue)
SET = ObjectKind(frozenset, _same_set, _write_set)
CELL = ObjectKind(_read_cell, _same_cell, _write_cell)
NAMES = ObjectKind(_read_names, _same_names, _write_names)
BYTES = ObjectKind(bytes, _same_bytes, _write_bytes)
NUMBERS = ObjectKind(
    lambda numbers: (numbers.typecode, numbers.tobytes()),
    lambda now, before: (now.typecode, now.tobytes()) == before,
    _write_numbers,
)
ARRAY = ObjectKind(lambda array: array.copy(), _same_array, _write_array)
GENERATOR = ObjectKind(_read_generator, _same_generator, _write_generator)
MODES = ObjectKind(_read_modes, _same_modes, _write_modes)


def may_be_shared(value: object) -> bool:
    """True if a value is a generator of Python or numpy. Other threads may draw from it as well,
    and then its state does not tell who has drawn."""
    return is_generator(value) and not isinstance(value, torch.Generator)


def is_generator(value: object) -> bool:
    """True if a value is a random number generator whose state can be read, other than torch's
    default one, which a trace leaves alone."""
    if isinstance(value, random.SystemRandom) or value is torch.random.default_generator:
        return False
    if isinstance(value, (random.Random, torch.Generator)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    drawing = numpy.random
    return isinstance(value, (drawing.Generator, drawing.RandomState, drawing.BitGenerator))
