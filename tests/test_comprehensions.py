"""What a step collects outside, computes of by comprehensions, and begins anew: few graphs, however
long the lists are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

CALLS = 22  # more than there may be graphs


class Log:
    def __init__(self) -> None:
        self.rows: list[float] = []
        self.pairs: list[tuple[float, int]] = []
        self.tables: list[dict[str, Any]] = []
        self.by_name: dict[str, list[tuple[float, int]]] = {}
        self.lists: dict[str, list[float]] = {"loss": [], "square": []}
        self.sums: dict[str, dict[str, float]] = {"train": {"loss": 0.0, "count": 0}}
        self.best = 0.5

    def state(self) -> Any:
        return self.rows, self.pairs, self.tables, self.by_name, self.lists, self.sums


def first_of_pairs(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 3))
    return float(np.median([pair[0] for pair in log.pairs[-20:]]))


def all_pairs(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 3))
    return sum([value for value, _ in log.pairs]) / len(log.pairs)


def largest(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    return max(abs(row) for row in log.rows)


def shown(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    return ", ".join(f"{row:.3f}" for row in log.rows)


def of_tables(log: Log, loss: Tensor) -> Any:
    log.tables.append({"loss": loss.item(), "count": 8, "split": "train"})
    mean = float(np.mean([table["loss"] for table in log.tables]))
    return mean, max(table.get("loss", 0.0) for table in log.tables)


def by_name(log: Log, loss: Tensor) -> Any:
    log.by_name.setdefault("loss", []).append((loss.item(), 1))
    return {name: sum([row[0] for row in rows]) for name, rows in log.by_name.items()}


def above(log: Log, loss: Tensor) -> Any:
    threshold = 0.3
    log.pairs.append((loss.item(), len(log.pairs)))
    found = [row for row, number in log.pairs if row > threshold and number % 2 == 0]
    return len(found), sum(found)


def distinct(log: Log, loss: Tensor) -> Any:
    log.rows.append(round(loss.item(), 1))
    return len({-row for row in log.rows})


def decided(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    if any(row > 1e9 for row in log.rows):
        return "diverged"
    return "fine" if all(row < 1e9 for row in log.rows[-5:]) else "high"


def in_a_helper(log: Log, loss: Tensor) -> Any:
    def mean(rows: Any) -> float:
        return sum([row[0] for row in rows]) / max(len(rows), 1)

    log.pairs.append((loss.item(), 1))
    return mean(log.pairs)


def begun_anew(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    if len(log.rows) < 3:
        return None
    found = sum([row * 2 for row in log.rows]) / len(log.rows)
    log.rows = []
    return found


def sum_begun_anew(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    if len(log.rows) < 3:
        return None
    found = sum(log.rows) / len(log.rows)
    log.rows = []
    return found


def lists_begun_anew(log: Log, loss: Tensor) -> Any:
    log.lists["loss"].append(loss.item())
    log.lists["square"].append(loss.item() ** 2)
    if len(log.lists["loss"]) < 3:
        return None
    found = {name: sum(values) / len(values) for name, values in log.lists.items()}
    log.lists = {"loss": [], "square": []}
    return found


def tables_begun_anew(log: Log, loss: Tensor) -> Any:
    log.sums["train"]["loss"] += loss.item()
    log.sums["train"]["count"] += 1
    if log.sums["train"]["count"] < 3:
        return None
    found = log.sums["train"]["loss"] / log.sums["train"]["count"]
    log.sums = {"train": {"loss": 0.0, "count": 0}}
    return found


def cleared(log: Log, loss: Tensor) -> Any:
    log.tables.append({"loss": loss.item()})
    if len(log.tables) < 3:
        return None
    found = sum([table["loss"] for table in log.tables]) / len(log.tables)
    log.tables.clear()
    return found


STEPS = [
    first_of_pairs,
    all_pairs,
    largest,
    shown,
    of_tables,
    by_name,
    above,
    distinct,
    decided,
    in_a_helper,
    begun_anew,
    sum_begun_anew,
    lists_begun_anew,
    tables_begun_anew,
    cleared,
]


def trained(
    rest: Callable[[Log, Tensor], Any],
    compiled: bool,
    given: bool,
    between: Callable[[Log, int], None] = lambda log, number: None,
    calls: int = CALLS,
) -> tuple[list[Any], int]:
    """What a step returns and leaves in each call, and in how many graphs."""
    torch.manual_seed(0)
    model, outside = nn.Linear(4, 3), Log()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
        return rest(outside, update(model, optimizer, x))

    def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, log: Log) -> Any:
        return rest(log, update(model, optimizer, x))

    function: Any = step_with if given else step
    run = graphopt.compile(function, pipeline="none") if compiled else function
    found = []
    for number in range(calls):
        between(outside, number)
        last = (outside,) if given else ()
        found.append(repr((run(model, optimizer, torch.randn(8, 4), *last), outside.state())))
    return found, len(run.captures) if compiled else 0


@pytest.mark.parametrize("given", [False, True], ids=["outside", "argument"])
@pytest.mark.parametrize("rest", STEPS)
def test_of_any_length(rest: Callable[[Log, Tensor], Any], given: bool) -> None:
    expected, _ = trained(rest, False, given)
    found, graphs = trained(rest, True, given)
    assert found == expected
    assert graphs <= 3


def _other_list(log: Log, number: int) -> None:
    if number % 4 == 3:
        log.rows, log.pairs = [0.25, 0.5], [(0.125, 7)] * number


def _other_rows(log: Log, number: int) -> None:
    if number % 3 == 2:
        log.rows[0], log.pairs[-1:] = 9.0 + number, [(float(number), 1), (0.5, 2)]
        log.tables[0:1] = [{"loss": 3.0 * number, "count": 1, "split": "other"}]


def everything(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    log.pairs.append((loss.item(), 3))
    log.tables.append({"loss": loss.item(), "split": "train"})
    return (
        [row for row in log.rows],  # noqa: C416 - what a program may write
        sum(pair[0] for pair in log.pairs),
        [table["split"] for table in log.tables if table["loss"] > 0.2],
    )


@pytest.mark.parametrize("between", [_other_list, _other_rows])
def test_of_what_the_program_puts_there(between: Callable[[Log, int], None]) -> None:
    expected, _ = trained(everything, False, False, between)
    found, _ = trained(everything, True, False, between)
    assert found == expected


def _lazy(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 1))
    log.rows.append(loss.item())
    factor = 2.0
    scaled, first = (row * factor for row in log.rows), (row for row in log.rows)
    factor = 3.0
    return sum(scaled), next(first), sum(first), sum(first)


def _changed_behind(log: Log, loss: Tensor) -> Any:
    row = [loss.item()]
    log.rows.append(loss.item())
    log.pairs.append(row)  # type: ignore[arg-type]
    before = sum([pair[0] for pair in log.pairs])
    row[0] = 99.0
    window = log.pairs[-3:]
    return before, sum([pair[0] for pair in log.pairs]), len(window)


def _taken_at_once(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 1))
    window = log.pairs[-3:]
    log.pairs.append((loss.item() * 2, 1))
    log.rows.append(loss.item())
    numbered = {number: -row for number, row in enumerate(log.rows[-2:])}
    numbered[7] = 1.0
    return sum([pair[0] for pair in window]), len(window), numbered


def _handed_on(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 1))
    last = [pair for pair in log.pairs][-1]  # noqa: C416 - what a program may write
    return last is log.pairs[-1]


def _written_behind(log: Log, loss: Tensor) -> Any:
    log.tables.append({"loss": loss.item()})
    found = sum([table["loss"] for table in log.tables])
    log.tables[0]["loss"] = 5.0
    return found


@pytest.mark.parametrize(
    "rest", [_lazy, _changed_behind, _taken_at_once, _handed_on, _written_behind]
)
def test_never_another_value(rest: Callable[[Log, Tensor], Any]) -> None:
    """What is not one function of all items is eager's, or refused."""
    expected, _ = trained(rest, False, False, calls=6)
    try:
        found, _ = trained(rest, True, False, calls=6)
    except graphopt.CaptureError:
        assert rest in (_handed_on, _written_behind, _changed_behind)
    else:
        assert found == expected


NOTED: list[float] = []


def _noting(value: float) -> float:
    NOTED.append(value)
    return value


def with_effects(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    return sum([_noting(row) for row in log.rows[-2:]])


def by_what_changes(log: Log, loss: Tensor) -> Any:
    log.pairs.append((loss.item(), 3))
    best = log.best
    return [pair[0] * best for pair in log.pairs[-2:]]


def _better(log: Log, number: int) -> None:
    log.best = 0.5 + number // 4


def abs_is_ours(log: Log, loss: Tensor) -> Any:
    log.rows.append(loss.item())
    return sum([abs(row) for row in log.rows[-2:]])


def test_what_does_more_than_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the program's, variables that change, names of Python's that the program has."""
    for rest, between in ((with_effects, _better), (by_what_changes, _better)):
        results = []
        for compiled in (False, True):
            NOTED.clear()
            found, _ = trained(rest, compiled, False, between, calls=9)
            results.append((found, list(NOTED)))
        assert results[0] == results[1]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "abs", lambda row: row * 100)
        expected, _ = trained(abs_is_ours, False, False, calls=4)
        found, _ = trained(abs_is_ours, True, False, calls=4)
    assert found == expected


def test_name_of_python_that_the_program_takes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(log: Log, number: int) -> None:
        if number == 3:
            monkeypatch.setitem(globals(), "abs", lambda row: row * 100)
        elif number == 0:
            monkeypatch.delitem(globals(), "abs", raising=False)

    expected, _ = trained(abs_is_ours, False, False, take, calls=6)
    found, _ = trained(abs_is_ours, True, False, take, calls=6)
    assert found == expected
