"""Lists and queues that a step finds, adds to and reads, and in whose place it leaves others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of, trained


def collected(held: Any, loss: Tensor, x: Tensor) -> Any:
    """As the gradients of one loss, which an optimizer keeps until the next one."""
    for factor in range(3):
        held.rows.append(x * factor)
    total = sum(each.sum() for each in held.rows) * len(held.rows)
    held.rows = []
    return total


def filled_in(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(None)
    rows = held.rows
    rows[0] = x * 2
    held.rows = []
    return rows[0].sum()


def twice(held: Any, loss: Tensor, x: Tensor) -> Any:
    for factor in range(2):
        held.rows.append(x * factor)
        held.rows.append(loss.item())
        first = held.rows[0]
        held.rows = []
    return first


def of_numbers(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(loss.item())
    mean = numpy.mean(held.rows)
    held.rows = []
    return mean


def trimmed(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(loss.item())
    before = numpy.mean(held.rows)
    held.rows = held.rows[-2:]
    print(held.rows)
    return before, held.rows[0], len(held.rows), numpy.std(held.rows)


def trimmed_constants(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(1.0)
    held.rows = held.rows[-2:]


def with_others(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(loss.item())
    held.rows = [*held.rows, 2.0]
    held.rows = sorted(held.rows)[:4]


def emptied(held: Any, loss: Tensor, x: Tensor) -> Any:
    held.rows.append(x)
    first = held.rows[0] * 2
    held.rows.clear()
    return first


def holders(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"object": SimpleNamespace(), "module": model, "optimizer": optimizer}


def replaced(held: Any, number: int) -> None:
    if number == 2:
        held.rows = []


def nothing(held: Any, number: int) -> None:
    """Each call finds what the one before has left."""


@pytest.mark.parametrize("where", ["object", "module", "optimizer"])
@pytest.mark.parametrize("between", [replaced, nothing])
@pytest.mark.parametrize(
    "use",
    [collected, filled_in, twice, of_numbers, trimmed, trimmed_constants, with_others, emptied],
)
def test_whoever_has_the_former_list_finds_what_eager_code_leaves(
    use: Callable[..., Any], between: Callable[..., Any], where: str
) -> None:
    def make() -> Loop:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = holders(model, optimizer)[where]
        held.rows, kept = [], []

        def step(number: int, x: Tensor) -> Any:
            return trained(model, optimizer, x), use(held, model(x).mean().detach(), x)

        def before(number: int) -> None:
            between(held, number)
            kept.append(held.rows)

        return Loop(step, lambda: [model, held.rows, kept], before)

    assert graphs_of(make, 5) <= (5 if use is with_others else 3)


def test_variables_of_a_closure() -> None:
    def make() -> Loop:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows: list[float] = []
        queue: deque[Tensor] = deque()
        kept: list[Any] = []

        def step(number: int, x: Tensor) -> Any:
            nonlocal rows, queue
            loss = trained(model, optimizer, x)
            rows.append(loss.item())
            queue.append(x)
            found = numpy.mean(rows), queue[0]
            rows, queue = rows[-2:], deque()
            return found

        def before(number: int) -> None:
            nonlocal rows
            if number == 3:
                rows = [5.0]
            kept.append((rows, list(queue)))

        return Loop(step, lambda: [rows, list(queue), kept], before)

    assert graphs_of(make, 6) == 1


def test_a_comparison_with_none_reads_nothing() -> None:
    def make() -> Loop:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plot: Any = {"Y": []}

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            if plot != None and plot["Y"] != None:  # noqa: E711
                plot["Y"].append(loss.item())
            return loss

        def before(number: int) -> None:
            nonlocal plot
            if number in (2, 4):
                plot = None if number == 2 else {"Y": [1.0]}

        return Loop(step, lambda: plot, before)

    assert graphs_of(make, 6) <= 3


def test_items_that_two_lists_have_are_one() -> None:
    """The program changes its batch, which the former list and the new one hold."""

    def make() -> Loop:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows: list[Tensor] = []
        batches: list[Tensor] = []

        def step(number: int, x: Tensor) -> Any:
            nonlocal rows
            batches.append(x)
            rows.append(x)
            rows = rows[-2:]
            return trained(model, optimizer, x)

        def left() -> Any:
            batches[-1].mul_(2)
            return rows

        return Loop(step, left)

    graphs_of(make, 4)


def test_a_row_that_is_changed_behind_a_part_of_its_list() -> None:
    held = SimpleNamespace(rows=[])
    model = nn.Linear(4, 1)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum().detach()
        row = [loss.item()]
        held.rows.append(row)
        held.rows = held.rows[-2:]
        row.append(3)
        return loss

    with pytest.raises(graphopt.CaptureError):
        step(torch.ones(2, 4))
    assert held.rows == []
