"""Lists of numbers in the place of which a step puts others, against eager: one graph takes the
numbers of whichever list is there, unless the step needs the list itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Accumulator:
    """That of "Dive into Deep Learning"."""

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *args: Any) -> None:
        self.data = [a + float(b) for a, b in zip(self.data, args, strict=False)]

    def __getitem__(self, index: int) -> float:
        return self.data[index]


Use = Callable[[Any, Accumulator, Tensor], Any]


def adds(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    metric.add(loss * 3, loss.item(), 3)
    return metric[0] / metric[2], f"{metric.data}"


def in_a_dictionary(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    kept.table["sums"] = [each + loss.item() for each in kept.table["sums"]]
    return sum(kept.table["sums"]), max(kept.table["sums"])


def decides(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    metric.data = [0.0] * 3 if metric[2] > 8 else [each + 3 for each in metric.data]


def begins_again(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    kept.log.append(loss.item())
    kept.before = [2.0 * each for each in metric.data]
    metric.add(loss, *metric.data[:2])


ONE_GRAPH: list[Use] = [adds, in_a_dictionary, begins_again]


def changes_it(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    metric.data[0] += 1.0
    metric.add(loss, 1, 3)


def keeps_it(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    kept.before = metric.data
    metric.add(loss, 1, 3)


def returns_it(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    found = metric.data
    metric.add(loss, 1, 3)
    return found


def asks_which(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    same = metric.data is kept.rows
    metric.add(loss, 1, 3)
    return same


def changes_another(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    kept.rows[0] += loss.item()
    metric.add(loss, 1, 3)


def read_by_a_callback(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    graphopt.callback(lambda: kept.log.append(list(metric.data)))
    metric.add(loss, 1, 3)
    graphopt.callback(lambda: kept.log.append(list(metric.data)))


def at_times(kept: Any, metric: Accumulator, loss: Tensor) -> Any:
    if kept.call % 3 == 1:
        metric.data[1] += loss.item()
    else:
        metric.add(loss, 1, 3)


OTHERS: list[Use] = [
    decides,
    changes_it,
    keeps_it,
    returns_it,
    asks_which,
    changes_another,
    at_times,
    read_by_a_callback,
]


def each_epoch(kept: Any, call: int) -> None:
    if call % 3 == 0:
        kept.metric = Accumulator(3)


def other_lists(kept: Any, call: int) -> None:
    each_epoch(kept, call)
    if call == 2:
        kept.metric.data = kept.rows
    if call == 4:
        kept.metric.data = [1, 2, 3]
    if call == 5:
        kept.metric.data = [1.0, 2.0, 3.0, 4.0]


def run(use: Use, change: Callable[[Any, int], None], compiled: bool) -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace(table={"sums": [0.0, 1.0]}, rows=[1.0, 2.0, 3.0], before=None, log=[])

    def step(x: Tensor, metric: Accumulator) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return use(kept, metric, loss.detach())

    used: Any = graphopt.compile(step) if compiled else step
    said, lists = [], []
    for kept.call, x in enumerate(torch.randn(6, 5, 4)):
        change(kept, kept.call)
        lists.append(kept.metric.data)
        returned = used(x, kept.metric)
        alike = [each is kept.metric.data for each in (kept.before, kept.rows, *lists)]
        said.append(repr((returned, vars(kept.metric), kept.table, kept.rows, lists, alike)))
        said.append(repr((kept.before, kept.log)))
    return said, len(used.captures) if compiled else 0


@pytest.mark.parametrize("use", ONE_GRAPH)
def test_other_numbers_take_no_other_graph(use: Use) -> None:
    expected, _ = run(use, each_epoch, False)
    found, captures = run(use, each_epoch, True)
    assert found == expected
    assert captures == 1


@pytest.mark.parametrize("change", [each_epoch, other_lists])
@pytest.mark.parametrize("use", [*ONE_GRAPH, *OTHERS])
def test_each_call_leaves_the_lists_of_eager(use: Use, change: Callable[[Any, int], None]) -> None:
    expected, _ = run(use, change, False)
    found, _ = run(use, change, True)
    assert found == expected


def test_a_callback_that_changes_the_list_is_an_error() -> None:
    model, metric = nn.Linear(4, 4), Accumulator(2)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        graphopt.callback(lambda: metric.data.append(1.0))
        metric.add(loss.detach(), 1)
        return loss

    with pytest.raises(graphopt.GraphOptError, match=r"changes .*metric\.data"):
        step(torch.ones(2, 4))
