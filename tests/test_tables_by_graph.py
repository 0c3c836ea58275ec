"""Lists and dictionaries outside a step into which it writes at places that only the graph knows:
everything compared with eager calls."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.errors import CaptureError
from loops import Loop, graphs_of, run, trained


def loop(table: Any, change: Callable[[Any, Tensor, Tensor], Any]) -> Callable[[], Loop]:
    """A loop that changes a copy of a table behind its update."""

    def make() -> Loop:
        model, found = nn.Linear(4, 2), copy.deepcopy(table)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            return loss, change(found, loss, x)

        left = found if isinstance(found, list) else lambda: list(found.items())
        return Loop(step, lambda: [model, left if isinstance(left, list) else left()])

    return make


def bins(table: Any, loss: Tensor, x: Tensor) -> None:
    for time, value in zip(x[:, 0].sigmoid().tolist(), x.abs().mean(1).tolist(), strict=True):
        table[int(time * 10)] += value


def labels(table: Any, loss: Tensor, x: Tensor) -> None:
    for label in x.argmax(1):
        table[label.item()] += 1


def texts(table: Any, loss: Tensor, x: Tensor) -> None:
    table[f"q{int(4 * x[0, 0].sigmoid().item())}"] += loss.item()


def sets_and_scales(table: Any, loss: Tensor, x: Tensor) -> None:
    index = x[0].argmax().item()
    table[index] = loss.item()
    table[index] *= 2
    table[0] += 1


def averages(table: Any, loss: Tensor, x: Tensor) -> None:
    index = x[0].argmax().item()
    old = table[index]
    table[index] = old * 0.9 + loss.item() * 0.1


def shown_behind(table: Any, loss: Tensor, x: Tensor) -> float:
    table[x[0].argmax().item()] += 1
    print(table)
    return sum(table)


def rows(table: Any, loss: Tensor, x: Tensor) -> None:
    table[x[0].argmax().item()] = [loss.item(), "row"]


def rows_that_are_there(table: Any, loss: Tensor, x: Tensor) -> None:
    row = table[x[0].argmax().item()]
    row.append(loss.item())
    table[x[1].argmax().item()][0] += x.mean().item()


def rows_that_begin(table: Any, loss: Tensor, x: Tensor) -> None:
    for label, value in zip(x.argmax(1).tolist(), x.sum(1), strict=True):
        table[label].append(value.item())


def by_turns(table: Any, loss: Tensor, x: Tensor) -> None:
    if x.std().item() > 1:
        table[x[0].argmax().item()] += 1
    else:
        table[0] += 1


CASES = {
    "bins of a dictionary": loop(dict.fromkeys(range(11), 0.0), bins),
    "bins of a list": loop([0.0] * 11, bins),
    "labels in a list": loop([0] * 4, labels),
    "labels in a counter": loop(Counter(), labels),
    "labels in a table that begins them": loop(defaultdict(int), labels),
    "texts": loop(defaultdict(float), texts),
    "a list whose items are set": loop([0.0] * 4, sets_and_scales),
    "a dictionary whose items are set": loop(dict.fromkeys(range(4), 0.0), sets_and_scales),
    "running averages": loop([0.0] * 4, averages),
    "a list that is read behind": loop([0] * 4, shown_behind),
    "rows": loop([[0.0, 1] for _ in range(4)], rows_that_are_there),
    "rows that begin": loop(defaultdict(list), rows_that_begin),
    "rows that each call makes": loop({}, rows),
    "a list whose item is written in other calls": loop([0.0] * 4, by_turns),
}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_only_the_graph_knows_where_it_is_written(make: Callable[[], Loop]) -> None:
    assert graphs_of(make) <= 2


def reads_before(table: Any, loss: Tensor, x: Tensor) -> int:
    first = table[0] + 1
    table[x[0].argmax().item()] += 1
    return int(first)


def changes_otherwise(table: Any, loss: Tensor, x: Tensor) -> None:
    table[x[0].argmax().item()] += 1
    table.append(0)


def reads_between(table: Any, loss: Tensor, x: Tensor) -> Any:
    old = table[x[0].argmax().item()]
    table[x[1].argmax().item()] += 1
    table[x[2].argmax().item()] = old
    return old


def shares_a_row(table: Any, loss: Tensor, x: Tensor) -> None:
    row = [loss.item()]
    table[x[0].argmax().item()] = table[x[1].argmax().item()] = row


def reads_a_row(table: Any, loss: Tensor, x: Tensor) -> int:
    first = table[0]
    first.append(1)
    table[x[0].argmax().item()].append(2)
    return len(first)


REFUSED = [reads_before, changes_otherwise, reads_between, shares_a_row]


@pytest.mark.parametrize("change", REFUSED)
def test_a_list_that_is_used_otherwise_as_well_is_refused(change: Any) -> None:
    with pytest.raises(CaptureError):
        run(loop([0] * 4, change), 3, compiled=True)


def test_a_row_that_is_used_otherwise_as_well_is_refused() -> None:
    with pytest.raises(CaptureError, match="reads or changes"):
        run(loop([[], []] * 2, reads_a_row), 3, compiled=True)
