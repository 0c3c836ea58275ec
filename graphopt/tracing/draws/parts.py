"""What a value taken from an iterator is made of: lists, tuples, dictionaries and plain objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from graphopt.tracing.given_objects import may_be_taken_apart
from graphopt.tracing.outside.places import attributes_of


class ItemAt:
    """Gives a part of what has been taken.

    Args:
        keys: which lead to it.
        path: how messages name it.
    """

    def __init__(self, keys: tuple[Any, ...], path: str) -> None:
        self._keys, self.__name__ = keys, f"next({path})"

    def __call__(self, value: Any) -> Any:
        for key in self._keys:
            value = vars(value)[key.name] if isinstance(key, AttributeKey) else value[key]
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ItemAt) and other._keys == self._keys

    def __hash__(self) -> int:
        return hash(self._keys)


def structure_of(value: Any) -> Any:
    """How a nest of lists, dictionaries and objects is built; of anything else its class."""
    parts = parts_of(value)
    if parts is None:
        return type(value)
    return (type(value), tuple((key, structure_of(each)) for key, each in parts))


class AttributeKey(NamedTuple):
    """The key of what an object has as an attribute."""

    name: str


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a list, a tuple, a dictionary, or an object of a plain class, by keys; None of
    anything else."""
    if type(value) in (list, tuple) or is_named_tuple(value):
        return list(enumerate(value))
    if type(value) in (dict, OrderedDict):
        return list(value.items())
    if may_be_taken_apart(type(value)):
        return [(AttributeKey(name), each) for name, each in (attributes_of(value) or {}).items()]
    return None


def made_like(value: Any, parts: Sequence[tuple[Any, Any]], inner: Sequence[Any]) -> Any:
    """A nest of the kind of another one."""
    if is_named_tuple(value):
        return type(value)(*inner)
    if type(value) in (list, tuple):
        return type(value)(inner)
    if type(value) in (dict, OrderedDict):
        return type(value)(zip((key for key, _ in parts), inner, strict=True))
    kind: Any = type(value)
    new = kind.__new__(kind)
    vars(new).update(zip((key.name for key, _ in parts), inner, strict=True))
    return new


def said_key(key: Any) -> str:
    return f".{key.name}" if isinstance(key, AttributeKey) else f"[{key!r}]"


def is_named_tuple(value: Any) -> bool:
    """Whether a value is of a class that `collections.namedtuple` has made."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")
