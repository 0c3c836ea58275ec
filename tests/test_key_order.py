"""The order of the keys that a step puts into a dictionary."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, lambda: defaultdict(list)], ids=["dict", "ordered", "default"]
)
def test_keys_are_in_the_order_of_eager_code(make: Callable[[], Any]) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, table = nn.Linear(2, 1), make()
        table["before"] = 1

        def step(x: Tensor) -> None:
            loss = model(x).sum()  # noqa: B023
            sums = table.setdefault("sum", [0.0, 0])  # noqa: B023
            sums[0] += loss.item()
            table["name"] = "train"  # noqa: B023
            calls = table.setdefault("calls", [0])  # noqa: B023
            calls[0] += 1
            table["loss"] = loss.detach()  # noqa: B023

        run = graphopt.compile(step) if compiled else step
        for index in range(3):
            run(torch.ones(2) * index)
        found.append(str(table))
    assert found[0] == found[1]
