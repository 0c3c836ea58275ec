"""Places that a step can read: an item, an attribute, a length, a closure variable, and so on."""

from __future__ import annotations

import collections
import ctypes
import enum
import gc
import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import CellType
from typing import Any, NamedTuple

import torch

from graphopt._compat.own_tracing import without_overrides
from graphopt._compat.threads import former_of
from graphopt.guards.values import is_plain, tensor_kind
from graphopt.ir.same_values import same_value
from graphopt.ir.source import SourceLine

MISSING = object()
"""Stands for what is not there."""

LISTS = (list, collections.deque)

LEADING = frozenset({"item", "class", "attribute", "cell", "target"})
"""Kinds of places where an object is, rather than what is found out about one."""

_TABLES = frozenset({dict, collections.OrderedDict, collections.defaultdict})

_COPIED = (set, frozenset, bytearray)


@dataclass(frozen=True)
class OutsidePlace:
    """A place outside the step that it can read or write. `holder` is kept alive.

    Attributes:
        kind: "item" of a dictionary or sequence; "has", whether it is there; "class", what a class
            has for a name; "attribute" that `getattr` finds; "type" of an object; "size"; "length"
            of an item; "keys" of a dictionary in order; "cell" of a closure; "whole" contents;
            "kind" of a tensor: all that is known of it but its values; "target" of a weak
            reference; "remembers", whether a function with a cache has not been made to forget
            since the cache was so full.
    """

    kind: str
    holder: Any
    key: Any = None

    @property
    def identity(self) -> tuple[Any, ...]:
        # Tensors are compared element by element.
        key = ("tensor", id(self.key)) if isinstance(self.key, torch.Tensor) else self.key
        return (self.kind, id(self.holder), key)

    @property
    def is_written(self) -> bool:
        """True if `write` supports this kind of place."""
        return self.kind in _WRITERS

    @property
    def is_item(self) -> bool:
        """True if the place is an item of a dictionary (attributes included) or similar class."""
        return self.kind == "item" and _is_table(type(self.holder))

    @property
    def may_carry(self) -> bool:
        """True if a value in the place may be a graph input that the step replaces."""
        return self.is_item or self.kind == "cell"

    @property
    def table(self) -> MutableMapping[Any, Any]:
        """The place's container as a mapping from its key to the value."""
        if self.kind == "cell":
            return CellTable(self.holder)
        table: MutableMapping[Any, Any] = self.holder
        return table

    def now(self) -> Any:
        """The current value in the place, `MISSING` if there is none."""
        try:
            return former_of(_READERS[self.kind](self.holder, self.key))
        except (KeyError, IndexError, AttributeError, ValueError, TypeError):
            return MISSING

    def write(self, value: Any) -> None:
        """Stores a value in the place; `MISSING` removes what is there. Of an item, an attribute, a
        variable of a closure, or what a class has for a name."""
        _WRITERS[self.kind](self.holder, self.key, value)


def _is_table(kind: type) -> bool:
    if kind in _TABLES:
        return True
    base = next((each for each in kind.__mro__ if each in _TABLES), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name) for name in _OF_ITEMS
    )


_OF_ITEMS = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "get", "pop",
             "setdefault", "keys", "items", "values")  # fmt: skip


def place_in(table: MutableMapping[Any, Any], key: Any) -> OutsidePlace:
    """The place with this `OutsidePlace.table` and key."""
    if isinstance(table, CellTable):
        return OutsidePlace("cell", table.cell, key)
    return OutsidePlace("item", table, key)


class CellTable(MutableMapping[Any, Any]):
    """A closure variable as a mapping with one item, under any key."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # a variable that has no value
            raise KeyError(key) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, key: Any) -> None:
        del self.cell.cell_contents

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 1


def _whole(holder: Any, key: Any) -> Any:
    if isinstance(holder, _COPIED):
        return frozenset(holder) if isinstance(holder, set) else bytes(holder)
    if isinstance(holder, ctypes.Array):
        return bytes(holder)
    if hasattr(type(holder), "tobytes"):
        return (getattr(holder, "shape", ()), str(getattr(holder, "dtype", "")), holder.tobytes())
    return _identities(holder.values() if isinstance(holder, dict) else holder)


def _identities(values: Iterable[Any]) -> tuple[Any, ...]:
    """Immutable values as they are, and other objects by id, for comparison."""
    values = list(values)
    if set(map(type, values)) <= _NUMBERS_AND_TEXT:
        return tuple(values)
    return tuple(value if is_value(value) else id(value) for value in values)


_NUMBERS_AND_TEXT = {int, float, bool, str, type(None)}


def _item(holder: Any, key: Any) -> Any:
    """Reads an item without calling `__missing__`, which might insert one."""
    return dict.get(holder, key, MISSING) if isinstance(holder, dict) else holder[key]


def filled(function: Any) -> tuple[int, int]:
    """The numbers of misses and entries of a function's `functools.lru_cache`."""
    info = function.cache_info()
    return info.misses, info.currsize


def _remembers(holder: Any, key: Any) -> Any:
    """True if a function's cache was not cleared since it was so full."""
    return all(now >= before for now, before in zip(filled(holder), key, strict=True))


def _cell(holder: CellType, key: Any) -> Any:
    return holder.cell_contents


def _kind(holder: torch.Tensor, key: Any) -> Any:
    with without_overrides():
        if holder.layout is not torch.strided:
            return (holder.shape, holder.dtype, holder.device, holder.requires_grad)
        # The gradients of others are guarded as inputs, but for those that the step drops.
        alone = holder.is_leaf and not holder.requires_grad
        return (*tensor_kind(holder), holder.is_leaf, alone and holder.grad is None)


_READERS: Mapping[str, Any] = {
    "class": lambda holder, key: vars(holder)[key],
    "item": _item,
    "attribute": getattr,
    "has": lambda holder, key: key in holder,
    "type": lambda holder, key: type(holder),
    "size": lambda holder, key: len(holder),
    "length": lambda holder, key: len(holder[key]),
    "keys": lambda holder, key: tuple(holder),
    "cell": _cell,
    "whole": _whole,
    "kind": _kind,
    "target": lambda holder, key: holder(),
    "remembers": _remembers,
}


def _write_item(holder: Any, key: Any, value: Any) -> None:
    """Writes an item without calling a user's `__setitem__`, which ran during the trace."""
    base: Any = next((kind for kind in _BASES if isinstance(holder, kind)), type(holder))
    if value is not MISSING:
        base.__setitem__(holder, key, value)
    elif not isinstance(holder, (list, collections.deque)) and base.__contains__(holder, key):
        base.__delitem__(holder, key)


_BASES = (collections.OrderedDict, dict, list, collections.deque)


def _write_cell(holder: CellType, key: Any, value: Any) -> None:
    if value is not MISSING:
        holder.cell_contents = value
    else:
        del holder.cell_contents  # nothing happens where there is no value


def _write_attribute(holder: Any, key: str, value: Any) -> None:
    """Writes an attribute without calling a user's `__setattr__`, which ran during the trace."""
    write: Any = type if isinstance(holder, type) else object
    if value is not MISSING:
        write.__setattr__(holder, key, value)
    elif hasattr(holder, key):
        write.__delattr__(holder, key)


_WRITERS: Mapping[str, Any] = {
    "item": _write_item,
    "cell": _write_cell,
    "attribute": _write_attribute,
    "class": _write_attribute,
}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, or None if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


def key_text(key: Any) -> str:
    """A key as text for messages. That of a tensor, as of optimizer state, is no text."""
    return repr(key) if is_value(key) else f"<{type(key).__name__}>"


class OutsideRead(NamedTuple):
    """A read of an outside place: the value, its path for messages, and the source line."""

    place: OutsidePlace
    value: Any
    path: str
    line: SourceLine


def same(a: Any, b: Any) -> bool:
    """True if two values are one object or equal immutable values."""
    return same_value(a, b, lambda value: type(value) is frozenset or is_value(value))


def is_value(value: object) -> bool:
    """True if a value is compared by value; others are compared by identity."""
    if type(value).__dictoffset__ and not isinstance(value, enum.Enum):
        return False  # it may have attributes besides
    if isinstance(value, tuple):
        return all(map(is_value, value))
    if type(value).__module__ == "numpy":
        return getattr(value, "ndim", 1) == 0 and not hasattr(value, "__setitem__")
    return is_plain(value) or isinstance(value, (torch.device, slice, range))


_VIEWS: tuple[type, ...] = (
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    types.MappingProxyType,
)


_BYTES = (bytearray, memoryview, ctypes.Array)
_HOLDING = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)


def is_container(value: Any) -> bool:
    """True if a value is a container whose items `contents` reads."""
    return isinstance(value, _HOLDING) or (
        type(value).__module__ in ("numpy", "array")
        and not isinstance(value, type)
        and hasattr(value, "__len__")
        and getattr(value, "ndim", 1) != 0
    )


def is_read(value: Any) -> bool:
    """True if `contents` covers what a step can read of a value: a container, or mutable bytes."""
    return is_container(value) or isinstance(value, _BYTES)


def is_bytes(value: Any) -> bool:
    """True if a value consists of numbers in memory, not of objects."""
    if isinstance(value, _BYTES):
        return True
    of_arrays = hasattr(type(value), "tobytes")
    return of_arrays and getattr(getattr(value, "dtype", None), "kind", "") != "O"


def bytes_in(value: Any) -> int:
    """The size in bytes of a container of numbers."""
    if isinstance(value, ctypes.Array):
        return ctypes.sizeof(value)
    known = getattr(value, "nbytes", None)
    return len(value) * getattr(value, "itemsize", 1) if known is None else int(known)


def viewed(value: Any) -> Any:
    """The container behind a dictionary view or a native bound method; other objects unchanged."""
    if isinstance(value, _VIEWS):
        return next(iter(gc.get_referents(value)), value)
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        return value.__self__ if is_container(value.__self__) else value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("flatiter", "void"):
        return value if value.base is None else value.base
    return value
