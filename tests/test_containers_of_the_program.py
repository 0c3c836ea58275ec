"""Containers of classes of the program's, which cannot be copied as their bases are."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

import graphopt


class Meters(defaultdict[str, list[Any]]):
    """As YOLOX's `MeterBuffer`: `copy.copy` of it raises a `TypeError`."""

    def __init__(self, window: int = 2) -> None:
        super().__init__(list)
        self.window = window

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self[name].append(value)


def test_a_dictionary_with_arguments_of_its_own() -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, meters = nn.Linear(3, 2), Meters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meters.add(phase="train")

        called = graphopt.compile(step) if compiled else step
        for _ in range(4):
            called(torch.ones(4, 3))
        return dict(meters), model.weight.tolist()

    assert run(False) == run(True)
