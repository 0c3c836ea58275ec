"""Bars of progress that programs draw themselves, against eager: fields that are items of an
object, texts that are repeated, times of numbers, and functions that draw by loops."""

# ruff: noqa: F507, UP031 - the ways to make text that are tested

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.errors import GraphOptError
from loops import Loop, graphs_of, run, trained


class Bar:
    """In the way of the package `progress`."""

    suffix = "%(index)d/%(total)d"

    def __init__(self, total: int = 8) -> None:
        self.index, self.total, self.asked, self.loss = 0, total, 0, 0.0

    def __getitem__(self, key: str) -> Any:
        self.asked += 1
        return getattr(self, key)

    @property
    def text(self) -> str:
        return f"<{self.loss:.3f}>"

    def line(self) -> str:
        filled = int(10 * self.index / self.total)
        return "".join(["|", "#" * filled, (10 - filled) * " ", "| ", self.suffix % self])


class Drawn:
    """A bar that is drawn letter by letter, which notes the time and what it has shown."""

    def __init__(self) -> None:
        self.begun = self.last = time.time()
        self.shown: list[str] = []
        self.best = 9.0

    def draw(self, number: int, total: int, text: str) -> None:
        for _ in range(int(20.0 * number / total)):
            sys.stdout.write("=")
        for _ in range(30 - len(text)):
            sys.stdout.write(" ")
        now = time.time()
        if int(now - self.last) > 100 and int((now - self.begun) * 1000) > 0:
            sys.stdout.write("late")
        self.last = now
        self.shown.append(text)
        print(text)

    def draw_best(self, loss: float) -> None:
        if loss < self.best:
            self.best = loss
        print("*" * int(self.best * 10))
        for _ in range(int(loss * 10)):
            sys.stdout.write("!")

    def draw_first(self, rows: list[int]) -> None:
        for _ in range(rows[0]):
            sys.stdout.write("-")
        print()
        rows.append(0)


SHOWN: dict[str, Callable[[Bar, int, float], str]] = {
    "bar": lambda bar, number, loss: bar.line(),
    "twice": lambda bar, number, loss: "%(asked)d %(asked)s %(loss)8.3f%%" % bar,
    "objects": lambda bar, number, loss: "%(text)s %(text)12s %(text)r" % bar,
    "no field": lambda bar, number, loss: f"{loss:.3f} {number}" % bar + "nothing" % bar,
    "beside a number": lambda bar, number, loss: (f"{loss:.3f} " + "%(index)03d") % bar,
    "repeated": lambda bar, number, loss: f"[{'=' * number:<9}]" + int(loss * 9) * "ab",
    "negative": lambda bar, number, loss: "=" * (3 - number) + "a" * -number,
    "time": lambda bar, number, loss: f"{datetime.timedelta(seconds=number * 100)}",
    "parts": lambda bar, number, loss: str(datetime.timedelta(0, bar.index).total_seconds()),
}


@pytest.mark.parametrize("name", SHOWN)
def test_texts_need_one_graph(name: str) -> None:
    def make() -> Loop:
        model = nn.Linear(4, 2)
        optimizer, bar, lines = torch.optim.SGD(model.parameters(), lr=0.1), Bar(), [""]

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x).item()
            bar.index += 1
            bar.loss = loss
            lines[0] = SHOWN[name](bar, number, loss)
            print(lines[0])

        return Loop(step, lambda: [model, vars(bar), lines])

    assert graphs_of(make, 5) == 1


def test_fields_in_a_text_that_a_number_makes_are_an_error() -> None:
    def make() -> Loop:
        model = nn.Linear(4, 2)
        optimizer, bar = torch.optim.SGD(model.parameters(), lr=0.1), Bar()

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x).item()
            print(f"{loss:.1%}(index)d" % bar)

        return Loop(step, lambda: model)

    with pytest.raises(GraphOptError, match="has fields itself"):
        run(make, 1, compiled=True)


def drawn(how: Callable[[Drawn, int, float], Any]) -> Callable[[], Loop]:
    def make() -> Loop:
        model = nn.Linear(4, 2)
        optimizer, bar, left = torch.optim.SGD(model.parameters(), lr=0.1), Drawn(), [None]

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x).item()
            print("before")
            left[0] = how(bar, number, loss)
            print("after")

        return Loop(step, lambda: [model, bar.shown, bar.best, left])

    return make


def draws(bar: Drawn, number: int, loss: float) -> None:
    bar.draw(number, 8, f"loss {loss:.3f}")
    bar.draw_best(loss)


def reads_before(bar: Drawn, number: int, loss: float) -> Any:
    best = bar.best
    bar.draw_best(loss)
    return best


def reads_behind(bar: Drawn, number: int, loss: float) -> Any:
    bar.draw_best(loss)
    return bar.best


def gives_its_own(bar: Drawn, number: int, loss: float) -> Any:
    rows = [number]
    bar.draw_first(rows)
    return rows


@pytest.mark.parametrize(("how", "graphs"), [(draws, 1), (reads_before, 2)])
def test_functions_that_draw_are_called_as_a_whole(how: Any, graphs: int) -> None:
    assert graphs_of(drawn(how), 5) == graphs


@pytest.mark.parametrize("how", [reads_behind, gives_its_own], ids=lambda how: how.__name__)
def test_those_behind_which_the_step_reads_are_followed(how: Any) -> None:
    assert graphs_of(drawn(how), 4) > 1
