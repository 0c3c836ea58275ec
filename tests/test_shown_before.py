"""What a step shows, or a function on the host finds, and the first call alone changes behind that,
is shown and found as it was."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.tracing.contents import LIST
from graphopt.tracing.found_earlier import EarlierContent

COUNTED = 0


class Slotted:
    __slots__ = ("value",)
    value: Any


class Held:
    of_class: Any = None

    def __init__(self) -> None:
        self.rows: Any = [9.0]
        self.queue: Any = deque([9.0], maxlen=2)
        self.table: Any = {"a": 1.0}
        self.known: Any = {1}
        self.outer: Any = [self.rows]
        self.slotted = Slotted()
        self.slotted.value = 1
        self.calls = 0
        self.found: Any = []

    def __str__(self) -> str:
        return f"held {self.rows}"


def popped(s: Held) -> None:
    print(s.rows)
    s.rows.pop() if s.rows else None


def between(s: Held) -> None:
    print(s.rows)
    s.rows.pop() if s.rows else None
    print(s.rows, s.rows)


def set_item(s: Held) -> None:
    print(s.rows)
    s.rows and s.rows.__setitem__(0, 5.0)


def removed(s: Held) -> None:
    print(s.rows)
    s.rows.remove(9.0) if 9.0 in s.rows else None


def of_queue(s: Held) -> None:
    print("queue", s.queue)
    s.queue.pop() if s.queue else None


def of_table(s: Held) -> None:
    print(s.table)
    s.table.pop("a", None)
    print(s.table)


def emptied(s: Held) -> None:
    print(s.table)
    s.table.clear()


def added(s: Held) -> None:
    print(s.known)
    s.known.add(2)
    print(s.known)


def within(s: Held) -> None:
    print(s.outer)
    s.rows.pop() if s.rows else None


def by_its_own_code(s: Held) -> None:
    print(s)
    s.rows.pop() if s.rows else None


def logged(s: Held) -> None:
    logging.getLogger("shown").warning("rows %s", s.rows)
    s.rows.pop() if s.rows else None


def by_a_function(s: Held) -> None:
    graphopt.callback(lambda: print(s.rows, s.outer))
    s.rows.pop() if s.rows else None
    graphopt.callback(lambda: print(s.rows, s.outer))


def twice(s: Held) -> None:
    graphopt.callback(lambda: print(s.table))
    s.table.setdefault("b", 2.0)
    graphopt.callback(lambda: print(s.table))
    s.table.setdefault("c", 2.0)
    graphopt.callback(lambda: print(s.table))


def attribute(s: Held) -> None:
    graphopt.callback(lambda: print(sorted(vars(s)), hasattr(s, "cache")))
    if not hasattr(s, "cache"):
        s.cache = {"made": 1}
    graphopt.callback(lambda: print(s.cache))


def besides_what_each_call_leaves(s: Held) -> None:
    s.calls += 1
    graphopt.callback(lambda: print(s.calls, hasattr(s, "cache")))
    if not hasattr(s, "cache"):
        s.cache = {"made": 1}
    s.calls += 1
    graphopt.callback(lambda: print(s.calls, s.cache))


def of_the_class(s: Held) -> None:
    graphopt.callback(lambda: print(Held.of_class))
    if Held.of_class is None:
        Held.of_class = "set"


def slot(s: Held) -> None:
    slotted = s.slotted
    graphopt.callback(lambda: print(slotted.value))
    if slotted.value == 1:
        slotted.value = 2


def of_the_module(s: Held) -> None:
    global COUNTED
    graphopt.callback(lambda: print(COUNTED))
    if not COUNTED:
        COUNTED = 5


def of_the_function(s: Held) -> None:
    known = s.known

    def show() -> None:
        print(known)

    graphopt.callback(show)
    known.discard(1)


def that_puts_something(s: Held) -> None:
    graphopt.callback(lambda: s.found.append(len(s.rows)))
    s.rows.pop() if s.rows else None


def put_back(s: Held) -> None:
    for held in (s.rows, s.queue):
        held.append(7.0)
    s.outer[0] = s.rows
    s.table["a"] = 3.0


@pytest.mark.parametrize(
    "show",
    [popped, between, set_item, removed, of_queue, of_table, emptied, added, within,
     by_its_own_code, logged, by_a_function, twice, attribute,
     besides_what_each_call_leaves, of_the_class, slot, of_the_module, of_the_function,
     that_puts_something],
)  # fmt: skip
@pytest.mark.parametrize("trains", [False, True])
def test_as_eager_code_shows_it(
    show: Callable[[Held], None], trains: bool, capsys: Any, caplog: Any
) -> None:
    def run(compiled: bool) -> list[Any]:
        global COUNTED
        torch.manual_seed(0)
        COUNTED, Held.of_class = 0, None
        s, model = Held(), nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: Tensor) -> Tensor:
            show(s)
            loss = model(x).square().mean()
            if trains:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        called = graphopt.compile(step, pipeline="none") if compiled else step
        found: list[Any] = []
        for number in range(4):
            if number == 2:
                put_back(s)
            caplog.clear()
            loss = float(called(torch.ones(4, 3) * number))
            messages = [each.getMessage() for each in caplog.records if each.name == "shown"]
            left = [*s.rows], [*s.queue], dict(s.table), set(s.known), [*s.found], COUNTED, s.calls
            found.append((loss, capsys.readouterr().out, messages, left))
        return found

    assert run(True) == run(False)


def test_what_is_changed_behind_may_not_be_changed_by_the_function() -> None:
    rows = [1.0]
    found = EarlierContent(LIST, rows, [1.0, 2.0], frozenset({0}))
    refused = pytest.raises(graphopt.GraphOptError, match=r"changes a list, .* changes behind it")
    with refused, found.present():
        rows.append(3.0)
    assert rows == [1.0]


def test_function_finds_each_time_of_a_loop_what_is_there_then() -> None:
    def run(compiled: bool) -> Any:
        rows, found = [1.0, 2.0, 3.0], list[Any]()

        def step(x: Tensor) -> Tensor:
            for _ in range(3):
                graphopt.callback(lambda: found.append([*rows]), every=2)
                if rows:
                    rows.pop()
            return x * 2

        called = graphopt.compile(step, pipeline="none") if compiled else step
        for _ in range(3):
            called(torch.ones(2))
        return rows, found

    assert run(True) == run(False)
