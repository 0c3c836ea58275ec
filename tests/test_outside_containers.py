"""What a step reads in nests, views and large containers outside: followed, on ranks as well."""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import functools
import itertools
import json
import operator
import time
import types
from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace as Box
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt.errors import CaptureError
from outside_nested import AROUND, KINDS
from slices import covering
from tests.loops import Loop, graphs_of, trained

CASES = list(itertools.product(AROUND, KINDS))


PARTS = 4


FEW = [
    ("dictionary", "namespace"),
    ("nothing", "named tuple"),
    ("namespace", "function with an attribute"),
    ("list", "number"),
    ("slots and attributes", "attributes"),
    ("partial", "descriptor"),
    ("named tuple", "data with slots"),
    ("data", "default dictionary"),
    ("nothing", "method with an attribute"),
]


def captures_of(around: str, kind: str) -> int:
    """How often a step is captured whose factor is the same in three calls and then another."""
    outer, inner = AROUND[around], KINDS[kind]
    held = types.SimpleNamespace()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) * inner[1](outer[1](held.given))

    compiled = graphopt.compile(step, pipeline="none")
    model, x, found = nn.Identity(), torch.ones(2), []
    for factor in (0.5, 0.5, 0.5, 0.75):
        held.given = outer[0](inner[0](factor))
        expected = step(model, x)
        result = compiled(model, x)
        assert torch.equal(result, expected), (around, kind, factor)
        found += [each for each in compiled.captures if not any(each is one for one in found)]
    return len(found)


def check(cases: list[tuple[str, str]]) -> None:
    wrong: list[tuple[str, str]] = []
    again: dict[tuple[str, str], int] = {}
    for around, kind in cases:
        try:
            count = captures_of(around, kind)
        except AssertionError:
            wrong.append((around, kind))
            continue
        if count != 2:
            again[around, kind] = count
    print(f"{len(cases)} cases, wrong: {wrong}, captured more often: {again}")
    assert not wrong, wrong


def test_a_change_within_new_objects_is_seen() -> None:
    check(FEW)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_within_new_objects_is_seen(part: int, seed: int) -> None:
    """Half of the combinations, among them each object and each one around it."""
    of_each = [dict(zip(("around", "kind"), case, strict=True)) for case in CASES]
    order = Random(seed).sample(range(len(CASES)), len(CASES))
    chosen = sorted(covering(of_each, 1, seed, order[: len(CASES) // 2]))
    check([CASES[number] for number in chosen[part::PARTS]])


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y) * factor["beta"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


factor = {"beta": 0.5}


def autocast_region_around_updates(rank: int) -> tuple[str, int, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(train)
    batch = torch.randn(3, 4) + rank, torch.tensor([0, 1, 0])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(graphopt.CaptureError) as caught:
        compiled(model, optimizer, *batch)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in range(2):
            compiled(model, optimizer, *batch)
    return str(caught.value), len(compiled.captures), model.weight.detach().clone()


def test_autocast_region_around_updates_is_refused_on_all_ranks(two_ranks: Pool) -> None:
    results = two_ranks.run(autocast_region_around_updates)
    for message, captures, weight in results:
        assert "autocast" in message and "test_outside_containers.py" in message
        assert captures == 1
        assert torch.equal(weight, results[0][2])


def change_on_both_ranks(rank: int) -> tuple[int, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(train)
    batch = torch.randn(3, 4) + rank, torch.tensor([0, 1, 0])
    for beta in (0.5, 0.5, 0.75, 0.75):
        factor["beta"] = beta
        compiled(model, optimizer, *batch)
    compiled.flush()
    return len(compiled.captures), model.weight.detach().clone()


def test_change_is_followed_on_all_ranks(two_ranks: Pool) -> None:
    results = two_ranks.run(change_on_both_ranks)
    assert [captures for captures, _ in results] == [2, 2]
    assert torch.equal(results[0][1], results[1][1])


MANY = 3000


def raise_item(held: Any) -> None:
    held[5] += 1


def raise_deep(held: Any) -> None:
    held["a"]["b"]["c"]["d"]["e"] += 1


def deep() -> Any:
    return {"a": {"b": {"c": {"d": {"e": 1.0}}}}}


CASES_OF_LARGE_AND_NESTED: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]
] = {
    "list": (lambda: [1.0] * MANY, lambda held: sorted(held)[-1], raise_item),
    "list in turn": (lambda: [1.0] * MANY, lambda held: max(each for each in held), raise_item),
    "list as a tensor": (lambda: [1.0] * MANY, lambda held: torch.tensor(held).max(), raise_item),
    "slice": (lambda: [1.0] * MANY, lambda held: max(held[:50]), raise_item),
    "has": (lambda: [1.0] * MANY, lambda held: 3.0 if 2.0 in held else 1.0, raise_item),
    "dictionary": (
        lambda: dict.fromkeys(range(MANY), 1.0),
        lambda held: max(held.values()),
        raise_item,
    ),
    "set": (lambda: set(range(MANY)), max, lambda held: held.add(2 * MANY)),
    "queue": (lambda: deque([1.0] * MANY), lambda held: held[5], raise_item),
    "array": (lambda: np.ones(100_000), lambda held: float(held.max()), raise_item),
    "item of an array": (lambda: np.ones(100_000), lambda held: float(held[5]), raise_item),
    "bytes": (lambda: bytearray(100_000), lambda held: 1.0 + max(held), raise_item),
    "numbers": (lambda: array.array("d", [1.0] * 100_000), max, raise_item),
    "deep copy": (deep, lambda held: copy.deepcopy(held)["a"]["b"]["c"]["d"]["e"], raise_deep),
    "deep text": (
        deep,
        lambda held: float(json.dumps(held).rpartition(":")[2].strip(" }")),
        raise_deep,
    ),
    "deep list": (
        lambda: [[[[[1.0]]]]],
        lambda held: torch.tensor(held).max(),
        lambda held: raise_deep({"a": {"b": {"c": {"d": _Last(held)}}}}),
    ),
}


class _Last:
    """The innermost number of a nest of lists, by a name."""

    def __init__(self, held: Any) -> None:
        self._list = held[0][0][0][0]

    def __getitem__(self, key: str) -> Any:
        return self._list[0]

    def __setitem__(self, key: str, value: Any) -> None:
        self._list[0] = value


def losses_of(held: Any, read: Callable[[Any], Any], change: Any, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x * read(held)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    used: Any = graphopt.compile(step) if compiled else step
    losses = []
    for _ in range(3):
        losses.append(used(torch.ones(3, 4)).item())
        change(held)
    return losses


@pytest.mark.parametrize("name", CASES_OF_LARGE_AND_NESTED)
def test_a_change_is_seen(name: str) -> None:
    make, read, change = CASES_OF_LARGE_AND_NESTED[name]
    assert losses_of(make(), read, change, True) == losses_of(make(), read, change, False)


LARGER: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.ones(3 << 20), lambda held: float(held.max())),
    "list": (lambda: [1.0] * 200_000, lambda held: max(each for each in held)),
}


@pytest.mark.parametrize("name", LARGER)
def test_what_costs_too_much_to_look_at_is_refused(name: str) -> None:
    make, read = LARGER[name]
    with pytest.raises(CaptureError, match="it reads all of held"):
        losses_of(make(), read, lambda held: None, True)


def test_the_hint_works() -> None:
    held = np.ones(3 << 20)
    held.flags.writeable = False
    losses = [losses_of(held, lambda a: float(a.max()), lambda a: None, on) for on in (True, False)]
    assert losses[0] == losses[1]


class Statistics:
    """As OpenNMT's."""

    def __init__(self, loss: Any = 0.0, start: Any = 0.5) -> None:
        self.loss, self.start = loss, start


class Report:
    """Where a step keeps one."""

    def __init__(self, made: Callable[[Tensor], Statistics]) -> None:
        self.made, self.statistics = made, Statistics()
        self.first = self.statistics

    def update(self, loss: Tensor, number: int) -> None:
        self.statistics.loss += loss.item()
        if number % 2:
            self.statistics = self.made(loss)


MADE: dict[str, Callable[[Tensor], Statistics]] = {
    "constants": lambda loss: Statistics(),
    "a number": lambda loss: Statistics(loss.item()),
    "a tensor": lambda loss: Statistics(0.0, loss.detach()),
}


def _looped(made: Callable[[Tensor], Statistics], twice: bool = False) -> Callable[[], Loop]:
    def make() -> Loop:
        net, report = nn.Linear(4, 2), Report(made)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(number: int, x: Tensor) -> None:
            if twice:
                report.first.loss += 1.0
            report.update(trained(net, optimizer, x), number)

        def left() -> list[Any]:
            start, now = report.statistics.start, time.time()
            recent = isinstance(start, float) and now - 100 < start <= now
            return [net, report.statistics.loss, recent or start]

        return Loop(step, left)

    return make


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_the_refusal_names_the_place(name: str, twice: bool) -> None:
    with pytest.raises(graphopt.CaptureError, match="statistics") as refused:
        graphs_of(_looped(MADE[name], twice))
    assert "self.statistics = self.made(loss)" in str(refused.value)


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


CASES_OF_READ_THROUGH_VIEWS: dict[str, Case] = {
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


@pytest.mark.parametrize("name", CASES_OF_READ_THROUGH_VIEWS)
def test_as_eager(name: str) -> None:
    make, read, change = CASES_OF_READ_THROUGH_VIEWS[name]
    eager, captured = (
        losses_of(make(), lambda box: read(box.shown), change, compiled)
        for compiled in (False, True)
    )
    assert captured == eager
