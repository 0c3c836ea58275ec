"""A container that a step shows, and changes behind that in its first call alone, is shown as it
was."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Held:
    def __init__(self) -> None:
        self.rows: Any = [9.0]
        self.queue: Any = deque([9.0], maxlen=2)
        self.table: Any = {"a": 1.0}
        self.known: Any = {1}
        self.outer: Any = [self.rows]

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


def put_back(s: Held) -> None:
    for held in (s.rows, s.queue):
        held.append(7.0)
    s.outer[0] = s.rows
    s.table["a"] = 3.0


@pytest.mark.parametrize(
    "show",
    [popped, between, set_item, removed, of_queue, of_table, emptied, added, within,
     by_its_own_code, logged],
)  # fmt: skip
@pytest.mark.parametrize("trains", [False, True])
def test_as_eager_code_shows_it(
    show: Callable[[Held], None], trains: bool, capsys: Any, caplog: Any
) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
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
            left = [*s.rows], [*s.queue], dict(s.table), set(s.known)
            found.append((loss, capsys.readouterr().out, messages, left))
        return found

    assert run(True) == run(False)
