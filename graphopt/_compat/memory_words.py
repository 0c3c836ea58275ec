"""Words in the memory of Python objects, thousands of which are read in one call.

The version of a dictionary, the size of a container, what a closure variable, a function or a
tensor refers to: each is a word at a fixed place in the memory of its object. numpy gathers them
in 3 ns each, where asking the object takes 40 ns and more. The places are found in samples when
this is imported. A place that is not found is not used.

CPython 3.10 to 3.12 count the changes of each dictionary; of later ones no version is used.
Only words of objects that the caller keeps alive may be read.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch

_WORD = 8
_WIDE = struct.calcsize("P") == _WORD
_SIZE = 2 * _WORD
"""The place of the number of items in containers, behind the count of references and the class."""
_VERSION = 3 * _WORD
"""The place of the version in dictionaries."""


class _Memory:
    """The process's memory between two addresses, as an array for numpy."""

    def __init__(self, first: int, words: int) -> None:
        self.__array_interface__ = {
            "data": (first, True),
            "shape": (words,),
            "typestr": "=u8",
            "version": 3,
        }


class MemoryWords:
    """The words at given addresses."""

    def __init__(self, addresses: Sequence[int]) -> None:
        first = min(addresses, default=0)
        words = (max(addresses, default=0) - first) // _WORD + 1
        self._take = np.asarray(_Memory(first, words)).take if addresses else None
        self._places = np.array([(each - first) // _WORD for each in addresses], dtype=np.intp)

    def now(self) -> bytes:
        """Returns the present words."""
        return b"" if self._take is None else self._take(self._places).tobytes()


def changed_words(before: bytes, now: bytes) -> Iterator[bool]:
    """Yields for each word whether it has changed."""
    pairs = zip(memoryview(before).cast("Q"), memoryview(now).cast("Q"), strict=True)
    return (a != b for a, b in pairs)


def version_word(container: object) -> int | None:
    """Returns the address of the version of a dictionary, or of the one behind a class's
    `__dict__`; None if no version tells of changes."""
    table = container
    if type(container) is MappingProxyType:
        (table,) = gc.get_referents(container)
    return id(table) + _VERSION if _VERSIONS_TELL and type(table) in _VERSIONED else None


def size_word(container: object) -> int | None:
    """Returns the address of the number of items of a dictionary or list."""
    return id(container) + _SIZE if _SIZES_TELL and type(container) in _SIZED else None


def content_word(cell: object) -> int | None:
    """Returns the address of a closure variable's content; None for other objects."""
    known = type(cell) is CellType and _CONTENT is not None
    return id(cell) + _CONTENT if known and _CONTENT is not None else None


def function_word(function: object, name: str) -> int | None:
    """Returns the address of a function's attribute; None if there is none."""
    offset = _OF_FUNCTIONS.get(name) if type(function) is FunctionType else None
    return None if offset is None else id(function) + offset


def hook_words(tensor: torch.Tensor) -> list[int]:
    """Returns the addresses of the tables of a tensor's gradient hooks, if it has none of them
    yet."""
    words = [id(tensor) + offset for offset in _OF_HOOKS]
    return words if words and not any(MemoryWords(words).now()) else []


_VERSIONED = frozenset({dict, defaultdict})
_SIZED = frozenset({dict, defaultdict, OrderedDict, list})


def _offset(owner: object, value: object) -> int | None:
    """Returns the only place in an object's memory with a reference to a value."""
    size = object.__sizeof__(owner)
    if not _WIDE or sys.implementation.name != "cpython":
        return None
    words = memoryview(ctypes.string_at(id(owner), size - size % _WORD)).cast("Q")
    found = [index * _WORD for index, word in enumerate(words) if word == id(value)]
    return found[0] if len(found) == 1 else None


def _word(owner: object, offset: int) -> int:
    return int.from_bytes(ctypes.string_at(id(owner) + offset, _WORD), sys.byteorder)


def _sizes_tell() -> bool:
    """True if the sizes of containers are where they are expected."""
    if not _WIDE or sys.implementation.name != "cpython":
        return False
    made: list[Callable[[int], Any]] = [
        lambda size: dict.fromkeys(range(size)),
        lambda size: OrderedDict.fromkeys(range(size)),
        lambda size: defaultdict(list, dict.fromkeys(range(size))),
        lambda size: list(range(size)),
    ]
    return all(_word(make(size), _SIZE) == size for make in made for size in (0, 1, 7, 1000))


_SIZES_TELL = _sizes_tell()


class _Changed:
    """A class whose attributes and those of its objects change, to see that versions tell."""

    mark = 0


def _store(owner: Any, value: object) -> None:
    owner.mark = value


_CALLS_OF_HOT = 100
"""The number of calls after which CPython runs an instruction that is specialized for `_store`."""


def _versions_of_changes() -> Iterator[tuple[int, int]]:
    """Yields the versions of dictionaries before and after changes of each kind."""
    owner = _Changed()
    of_class = gc.get_referents(vars(_Changed))[0]
    changes: list[tuple[dict[Any, Any], Callable[[], Any]]] = [
        *[(vars(owner), lambda: _store(owner, object()))] * _CALLS_OF_HOT,
        (vars(owner), lambda: setattr(owner, "mark", object())),
        (vars(owner), lambda: delattr(owner, "mark")),
        (of_class, lambda: setattr(_Changed, "mark", object())),
    ]
    for table in (dict.fromkeys("abc", 0), defaultdict(int, dict.fromkeys("abc", 0))):
        changes += [
            (table, lambda table=table: table.update(a=object())),  # type: ignore[misc]
            (table, lambda table=table: table.__setitem__("d", 1)),  # type: ignore[misc]
            (table, lambda table=table: table.setdefault("e", 1)),  # type: ignore[misc]
            (table, lambda table=table: table.pop("a")),  # type: ignore[misc]
            (table, table.popitem),
            (table, table.clear),
            (table, lambda table=table: table.update({"f": 1})),  # type: ignore[misc]
            (table, table.clear),
            (table, lambda table=table: table.__ior__({"g": 1})),  # type: ignore[misc]
        ]
    for changed, change in changes:
        before = _word(changed, _VERSION)
        change()
        yield before, _word(changed, _VERSION)


def _versions_tell() -> bool:
    """True if each change of a dictionary gives it a version that none has had."""
    if not _SIZES_TELL or sys.version_info >= (3, 13):
        return False
    found = list(_versions_of_changes())
    return all(before != after for before, after in found)


_VERSIONS_TELL = _versions_tell()

_CONTENT = _offset(*(lambda content: (CellType(content), content))(object()))


def _offsets_in_functions() -> dict[str, int]:
    """Returns where functions have what decides on their calls."""

    def sample(a: object = object(), *, b: object = None) -> None: ...

    names = ("__code__", "__defaults__", "__kwdefaults__")
    found = {name: _offset(sample, getattr(sample, name)) for name in names}
    return {name: offset for name, offset in found.items() if offset is not None}


_OF_FUNCTIONS = _offsets_in_functions()


def _offsets_of_hooks() -> list[int]:
    """Returns where tensors have the tables of their gradient hooks; none where one is not
    found."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.empty(1, device="cpu", requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    tensor.register_post_accumulate_grad_hook(lambda tensor: None)
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    found = [_offset(tensor, table) for table in tables]
    return [] if None in found else [each for each in found if each is not None]


_OF_HOOKS = _offsets_of_hooks()
