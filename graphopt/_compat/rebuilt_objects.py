"""Flattening of Python objects that a step creates, so that each call creates them again.

Meter(0, [1])        of the program's own class: its attributes, without a call of `__init__`
{1, 2}               sets
lambda: rate         functions: their defaults, and the variables of their closures
np.zeros(3)          arrays: copies, as long as nothing in them is traced
"""

from __future__ import annotations

import array
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.utils import _pytree

from graphopt._compat.classes import is_made_by_statement
from graphopt._compat.identity import ByIdentity

_OWN_STATE = ("__reduce__", "__reduce_ex__", "__del__", "__new__")
"""Methods of a class that may make more of its objects than their attributes."""


_WITH_MORE = (sys.stdlib_module_names | {"torch", "numpy", "graphopt"}) - {"__main__"}
"""Packages of classes whose objects are more than their attributes, such as modules."""


_PLAIN_PACKAGES = ("torch.distributions.",)
"""Of these, those whose classes are nothing else."""


class _ObjectRecipe(NamedTuple):
    """The recipe to rebuild an object from its parts: `make(parts, *known)`."""

    make: Callable[..., Any]
    known: tuple[Any, ...]


class _FlattenedObject:
    """The pytree container in place of an object that is to be flattened."""

    def __init__(self, values: list[Any], kind: _ObjectRecipe) -> None:
        self.values, self.kind = values, kind


def _made(values: Iterable[Any], kind: _ObjectRecipe) -> Any:
    return kind.make(list(values), *kind.known)


_pytree.register_pytree_node(_FlattenedObject, lambda parts: (parts.values, parts.kind), _made)


def open_object(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a set, function, array or plain object, and a function to rebuild it; see
    `open_nest`."""
    found = _opened(value)
    if found is None:
        return None
    values, kind = found
    return values, lambda parts: _FlattenedObject(parts, kind)


def _opened(value: Any) -> tuple[list[Any], _ObjectRecipe] | None:
    kind = type(value)
    if kind is set:
        return list(value), _ObjectRecipe(set, ())
    if kind is types.FunctionType:
        return _opened_function(value)
    if kind is Counter:
        return [*value, *value.values()], _ObjectRecipe(_counter, ())
    if kind is bytearray:
        return [], _ObjectRecipe(_bytes, (bytes(value),))
    if kind is array.array:
        return [], _ObjectRecipe(_array, (value.typecode, value.tobytes()))
    if _is_array(value):
        known = (value.dtype, value.shape, value.tobytes("A"), value.flags.fnc)
        return [], _ObjectRecipe(_array_of_numpy, known)
    return _opened_object(value)


def _counter(parts: list[Any]) -> Any:
    half = len(parts) // 2
    return Counter(dict(zip(parts[:half], parts[half:], strict=True)))


def _opened_function(value: types.FunctionType) -> tuple[list[Any], _ObjectRecipe] | None:
    if value.__dict__:
        return None
    cells = value.__closure__ or ()
    try:
        held = [cell.cell_contents for cell in cells]
    except ValueError:  # a variable that has no value yet
        return None
    known = (
        value.__code__,
        ByIdentity(value.__globals__),
        value.__name__,
        value.__qualname__,
        len(held),
    )
    return [*held, value.__defaults__, value.__kwdefaults__], _ObjectRecipe(_function, known)


def _opened_object(value: Any) -> tuple[list[Any], _ObjectRecipe] | None:
    kind = type(value)
    base = _base_of(kind)
    if kind is base or not all(each in (object, base) or _is_plain(each) for each in kind.__mro__):
        return None
    own = getattr(value, "__dict__", {})
    keys = tuple(dict.keys(value)) if base is dict else None
    held = [] if base is object else list(base.values(value) if base is dict else value)
    names = None if own is value else tuple(own)
    slots = tuple(name for name in _slots(kind) if hasattr(value, name))
    values = [*held, *(own[name] for name in names or ()), *(getattr(value, n) for n in slots)]
    return values, _ObjectRecipe(_object, (kind, keys, len(held), names, slots))


def _is_plain(kind: type) -> bool:
    """True if a user's class adds only attributes to its objects."""
    if not is_made_by_statement(kind):
        return kind is types.SimpleNamespace
    package = kind.__module__.partition(".")[0]
    if package in _WITH_MORE and not kind.__module__.startswith(_PLAIN_PACKAGES):
        return False
    return not any(name in vars(kind) for name in _OWN_STATE) and type(kind) is type


def _slots(kind: type) -> list[str]:
    return [
        name
        for each in kind.__mro__
        for name, member in vars(each).items()
        if type(member) is types.MemberDescriptorType and "__slots__" in vars(each)
    ]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _function(
    values: list[Any], code: types.CodeType, names: ByIdentity, name: str, qualified: str, held: int
) -> Any:
    cells = tuple(map(types.CellType, values[:held]))
    function = types.FunctionType(code, names.value, name, values[held], cells)
    function.__kwdefaults__, function.__qualname__ = values[held + 1], qualified
    return function


def _bytes(values: list[Any], content: bytes) -> bytearray:
    return bytearray(content)


def _array(values: list[Any], code: str, content: bytes) -> Any:
    return array.array(code, content)


def _array_of_numpy(
    values: list[Any], dtype: Any, shape: tuple[int, ...], content: bytes, by_columns: bool
) -> Any:
    import numpy

    order: Any = "F" if by_columns else "C"
    return numpy.ndarray(shape, dtype, content, order=order).copy(order)


def _object(
    values: list[Any],
    kind: type,
    keys: tuple[Any, ...] | None,
    held: int,
    names: tuple[str, ...] | None,
    slots: tuple[str, ...],
) -> Any:
    """Rebuilds an object without calling its `__init__`.

    Args:
        keys: the keys of a dictionary.
        held: the number of values that a dictionary or list holds.
        names: of its attributes; None: those are what is in the dictionary itself.
    """
    new: Any = _new(kind)
    if keys is not None:
        dict.update(new, zip(keys, values[:held], strict=True))
    elif issubclass(kind, list):
        list.extend(new, values[:held])
    if names is None:
        new.__dict__ = new
    for name, value in zip(names or (), values[held:], strict=False):
        new.__dict__[name] = value
    for name, value in zip(slots, values[len(values) - len(slots) :], strict=True):
        object.__setattr__(new, name, value)
    return new


def _base_of(kind: type) -> Any:
    """The container class that a user's class derives from, or `object`."""
    return next((each for each in (dict, list) if issubclass(kind, each)), object)


def _new(kind: type) -> Any:
    base = _base_of(kind)
    return base.__new__(kind) if kind is not types.SimpleNamespace else kind()
