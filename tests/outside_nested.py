"""Objects of many kinds, with a factor in them, within objects of many kinds.

`KINDS` make an object for a factor and read it from it; `AROUND` make an object around another and
get it out again. All are made anew for every call.
"""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import dataclasses
import functools
import queue
import types
from collections.abc import Callable
from typing import Any, NamedTuple

Make = Callable[[Any], Any]
Get = Callable[[Any], Any]


class Fields(NamedTuple):
    value: Any
    more: int = 0


Plain = collections.namedtuple("Plain", "value more")


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class SlotsAndAttributes:
    """With attributes, and without weak references."""

    __slots__ = ("__dict__",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Attributes:
    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def doubled(self) -> Any:
        return self.value * 2

    def get(self) -> Any:
        return self.value


class Computed:
    def __init__(self, value: Any) -> None:
        self._hidden = {"value": value}

    def __getattr__(self, name: str) -> Any:
        return self._hidden[name]


class Field:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.stored

    def __set__(self, owner: Any, value: Any) -> None:
        owner.stored = value


class Described:
    value = Field()

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True)
class Data:
    value: Any


@dataclasses.dataclass(slots=True)
class SlottedData:
    value: Any


class Cached:
    def __init__(self, value: Any) -> None:
        self.given = value

    @functools.cached_property
    def value(self) -> Any:
        return self.given


class Whole(int):
    """A number with attributes."""


class Text(str):
    """A text with attributes."""


class Row(tuple):
    """A tuple with attributes."""


class Table(dict[str, Any]):
    """A dictionary with attributes."""


class Values(list[Any]):
    """A list with attributes."""


class Structure(ctypes.Structure):
    _fields_ = (("value", ctypes.c_double),)


def _with(made: Any, value: Any) -> Any:
    made.value = value
    return made


def _function(value: Any) -> Any:
    def function() -> Any:
        return value

    return function


def _marked(value: Any) -> Any:
    return _with(lambda: 1, value)


def _keyword(value: Any) -> Any:
    return lambda *, given=value: given


def _queue(value: Any) -> Any:
    made: queue.Queue[Any] = queue.Queue()
    made.put(value)
    return made


def value_of(given: Any) -> Any:
    return given.value


def first_of(given: Any) -> Any:
    return given[0]


def called(given: Any) -> Any:
    return given()


KINDS: dict[str, tuple[Make, Get]] = {
    "namespace": (lambda v: types.SimpleNamespace(value=v), value_of),
    "named tuple": (Fields, value_of),
    "named tuple by position": (Fields, first_of),
    "plain named tuple": (lambda v: Plain(v, 1), lambda given: given._asdict()["value"]),
    "slots": (Slots, value_of),
    "slots and attributes": (SlotsAndAttributes, value_of),
    "attributes": (Attributes, value_of),
    "property": (Attributes, lambda given: given.doubled / 2),
    "method": (lambda v: Attributes(v).get, called),
    "__getattr__": (Computed, value_of),
    "descriptor": (Described, value_of),
    "data": (Data, value_of),
    "data with slots": (SlottedData, value_of),
    "cached property": (Cached, value_of),
    "number": (lambda v: _with(Whole(1), v), value_of),
    "text": (lambda v: _with(Text("a"), v), value_of),
    "tuple": (lambda v: _with(Row((1, 2)), v), value_of),
    "dictionary with attributes": (lambda v: _with(Table(a=1), v), value_of),
    "dictionary of a subclass": (lambda v: Table(value=v), lambda given: given["value"]),
    "list with attributes": (lambda v: _with(Values([1]), v), value_of),
    "list of a subclass": (lambda v: Values([v]), first_of),
    "exception": (lambda v: _with(ValueError("a"), v), value_of),
    "arguments": (lambda v: argparse.Namespace(value=v), value_of),
    "dictionary": (lambda v: {"value": v}, lambda given: given["value"]),
    "get": (lambda v: {"value": v}, lambda given: given.get("value")),
    "default dictionary": (
        lambda v: collections.defaultdict(int, value=v),
        lambda given: given["value"],
    ),
    "ordered dictionary": (
        lambda v: collections.OrderedDict(value=v),
        lambda given: given["value"],
    ),
    "user dictionary": (lambda v: collections.UserDict(value=v), lambda given: given["value"]),
    "chain": (lambda v: collections.ChainMap({}, {"value": v}), lambda given: given["value"]),
    "view": (lambda v: types.MappingProxyType({"value": v}), lambda given: given["value"]),
    "list": (lambda v: [v], first_of),
    "last of a list": (lambda v: [0, v], lambda given: given[-1]),
    "slice": (lambda v: [v, 0], lambda given: sum(given[:1])),
    "deque": (lambda v: collections.deque([v]), first_of),
    "loop": (lambda v: [v, 1.0], lambda given: min(each for each in given)),
    "unpacked": (lambda v: (v, 1.0), lambda given: (lambda a, b: a)(*given)),
    "function": (_function, called),
    "function with an attribute": (_marked, value_of),
    "method with an attribute": (lambda v: types.MethodType(_marked(v), 1), value_of),
    "keyword default": (_keyword, called),
    "partial": (lambda v: functools.partial(first_of, [v]), called),
    "class": (lambda v: type("Made", (), {"value": v}), value_of),
    "module": (lambda v: _with(types.ModuleType("made"), v), value_of),
    "structure": (Structure, value_of),
    "array": (lambda v: array.array("d", [v]), first_of),
    "queue": (_queue, lambda given: given.queue[0]),
    "text of a number": (lambda v: f"{v}", float),
    "bytes": (lambda v: bytearray(str(v), "ascii"), lambda given: float(given.decode())),
    "set": (lambda v: {v}, lambda given: 0.5 if 0.5 in given else 0.75),
    "length": (lambda v: [0] * int(v * 4), len),
}
AROUND: dict[str, tuple[Make, Get]] = {
    name: KINDS[name]
    for name in (
        "namespace",
        "named tuple",
        "slots",
        "slots and attributes",
        "attributes",
        "data",
        "number",
        "dictionary",
        "list",
        "default dictionary",
        "function",
        "keyword default",
    )
}
AROUND["nothing"] = lambda v: v, lambda given: given
AROUND["partial"] = lambda v: functools.partial(called, lambda: v), called
