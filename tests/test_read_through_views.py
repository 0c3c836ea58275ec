"""What a step reads by way of something else: views of dictionaries and of bytes, methods that were
taken from a container, containers written in Python. A change behind them is no stale value."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import operator
import types
from collections.abc import Callable
from types import SimpleNamespace as Box
from typing import Any

import numpy as np
import pytest

from test_large_and_nested import losses_of


def table() -> dict[str, float]:
    return {"k": 2.0}


def seen_by(show: Callable[[Any], Any]) -> Callable[[], Box]:
    def make() -> Box:
        held = table()
        return Box(held=held, shown=show(held))

    return make


def raised(box: Box) -> None:
    box.held["k"] += 1


def extended(box: Box) -> None:
    box.held[str(len(box.held))] = 1.0


def first_raised(box: Box) -> None:
    box.held[0] += 1


def shown_of(held: Any, show: Callable[[Any], Any]) -> Callable[[], Box]:
    def make() -> Box:
        own = held()
        return Box(held=own, shown=show(own))

    return make


Case = tuple[Callable[[], Box], Callable[[Any], float], Callable[[Box], None]]

PROXY = seen_by(types.MappingProxyType)
VALUES, ITEMS, KEYS = (seen_by(kind) for kind in (dict.values, dict.items, dict.keys))
CHAIN = seen_by(lambda held: collections.ChainMap({}, held))
USERS = shown_of(lambda: collections.UserDict(k=2.0), lambda held: held)
LISTED = shown_of(lambda: collections.UserList([2.0]), lambda held: held)
BYTES = shown_of(lambda: bytearray([2, 3]), memoryview)
NUMBERS = shown_of(lambda: array.array("f", [2.0]), memoryview)
NUMBERS_OF_C = shown_of(lambda: (ctypes.c_double * 2)(2.0, 1.0), lambda held: held)
ARRAY = shown_of(lambda: np.array([2.0]), lambda held: held.flat)
ROWS = shown_of(
    lambda: np.array([(2.0, 1)], dtype=[("a", "f8"), ("b", "i4")]), lambda held: held[0]
)


def row_raised(box: Box) -> None:
    box.held["a"] += 1


CASES: dict[str, Case] = {
    "proxy item": (PROXY, lambda s: s["k"], raised),
    "proxy get": (PROXY, lambda s: s.get("k"), raised),
    "proxy has": (PROXY, lambda s: 1.0 if "1" in s else 2.0, extended),
    "proxy size": (PROXY, lambda s: float(len(s)), extended),
    "proxy copied": (PROXY, lambda s: dict(s)["k"], raised),
    "proxy joined": (PROXY, lambda s: (s | {})["k"], raised),
    "proxy items": (PROXY, lambda s: sum(value for _, value in s.items()), raised),
    "values listed": (VALUES, lambda s: max(list(s)), raised),
    "values summed": (VALUES, sum, raised),
    "values in turn": (VALUES, lambda s: sum(value * 2 for value in s), raised),
    "values next": (VALUES, lambda s: next(iter(s)), raised),
    "items copied": (ITEMS, lambda s: dict(s)["k"], raised),
    "items has": (ITEMS, lambda s: 1.0 if ("k", 2.0) in s else 2.0, raised),
    "keys has": (KEYS, lambda s: 1.0 if "1" in s else 2.0, extended),
    "keys size": (KEYS, lambda s: float(len(s)), extended),
    "keys met": (KEYS, lambda s: 1.0 + len(s & {"1"}), extended),
    "chain item": (CHAIN, lambda s: s["k"], raised),
    "chain size": (CHAIN, lambda s: float(len(s)), extended),
    "users' item": (USERS, lambda s: s["k"], raised),
    "users' values": (USERS, lambda s: sum(s.values()), raised),
    "users' list": (LISTED, lambda s: s[0], first_raised),
    "users' list summed": (LISTED, sum, first_raised),
    "byte": (BYTES, lambda s: float(s[0]), first_raised),
    "bytes listed": (BYTES, lambda s: float(max(list(s))), first_raised),
    "bytes copied": (BYTES, lambda s: float(s.tobytes()[0]), first_raised),
    "number": (NUMBERS, lambda s: s[0], first_raised),
    "number of C": (NUMBERS_OF_C, lambda s: s[0], first_raised),
    "numbers of C": (NUMBERS_OF_C, sum, first_raised),
    "flat": (ARRAY, lambda s: float(s[0]), first_raised),
    "row": (ROWS, lambda s: float(s["a"]), row_raised),
    "method get": (seen_by(lambda held: held.get), lambda s: s("k"), raised),
    "method item": (seen_by(lambda held: held.__getitem__), lambda s: s("k"), raised),
    "method of a list": (
        shown_of(lambda: [2.0], lambda held: held.__getitem__),
        lambda s: s(0),
        first_raised,
    ),
    "method mapped": (seen_by(lambda held: held.get), lambda s: next(iter(map(s, ["k"]))), raised),
    "partial": (
        seen_by(lambda held: functools.partial(operator.getitem, held)),
        lambda s: s("k"),
        raised,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str) -> None:
    make, read, change = CASES[name]
    eager, captured = (
        losses_of(make(), lambda box: read(box.shown), change, compiled)
        for compiled in (False, True)
    )
    assert captured == eager
