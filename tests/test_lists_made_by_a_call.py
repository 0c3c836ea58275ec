"""A list of counts that the first call of a step makes, and in which the next one counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


def by_default(table: Any, key: str, value: Any) -> None:
    entry = table[key]
    entry[0] += value
    entry[1] += 1


def set_by_default(table: Any, key: str, value: Any) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += value
    entry[1] += 1


def where_missing(table: Any, key: str, value: Any) -> None:
    if key not in table:
        table[key] = [0, 0]
    table[key][0] += value
    table[key][1] += 1


@pytest.mark.parametrize("log", [by_default, set_by_default, where_missing])
def test_a_number_is_counted_in_a_list_that_the_first_call_makes(
    log: Callable[[Any, str, Any], None],
) -> None:
    tables = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        table: defaultdict[str, list[Any]] = defaultdict(lambda: [0, 0])
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def step(x: Tensor, late: bool) -> None:
            loss = model(x).sum()  # noqa: B023
            log(table, "target", -2)  # noqa: B023
            log(table, "loss", loss.item())  # noqa: B023
            if late:
                log(table, "late", 1)  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023

        run = graphopt.compile(step) if compiled else step
        for index in range(6):
            run(torch.ones(2) * index, index > 2)
        tables.append(dict(table))
    assert tables[0] == tables[1]
