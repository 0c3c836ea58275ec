"""The largest and the smallest of numbers that a step reads: no decisions, so that one
graph serves whatever they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

CASES: dict[str, Callable[[list[float]], Any]] = {
    "of a list": max,
    "of a tuple": lambda v: min(tuple(v)),
    "of a queue": lambda v: max(deque(v, maxlen=3)),
    "of a generator": lambda v: max(x for x in v),
    "of squares": lambda v: min(map(abs, v)),
    "of a dictionary": lambda v: max({"a": v[0], "b": v[1], "c": 0.5}.values()),
    "of arguments": lambda v: max(v[0], v[1], 0.5),
    "or else": lambda v: max(v, default=0.0),
    "of a set of constants": lambda v: max({0.5, 0.25}) + max(v),
}


def trained(read: Callable[[list[float]], Any], captured: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batches: list[Tensor]) -> Any:
        values = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return read(values)

    compiled = graphopt.compile(step, pipeline="none")
    run: Callable[..., Any] = compiled if captured else step
    found = [run([torch.randn(8, 6) for _ in range(4)]) for _ in range(12)]
    return [found, *(p.tolist() for p in model.parameters())], len(compiled.captures)


@pytest.mark.parametrize("read", CASES.values(), ids=CASES)
def test_one_graph(read: Callable[[list[float]], Any]) -> None:
    found, graphs = trained(read, True)
    expected, _ = trained(read, False)
    assert repr(found) == repr(expected)  # -0.0 and 0.0 are equal
    assert graphs == 1
