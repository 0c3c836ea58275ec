"""Arrays that a step makes by `numpy.empty` and fills item by item."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from loops import Loop, graphs_of, trained


def by_drawn_places() -> Loop:
    """A replay memory that keeps frames in a list (toshikwa's fqf-iqn-qrdqn)."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frames = [np.arange(4, dtype=np.uint8) + i for i in range(9)]

    def step(number: int, x: torch.Tensor) -> torch.Tensor:
        states = np.empty((3, 4), dtype=np.uint8)
        for i, index in enumerate(np.random.randint(0, len(frames), size=3)):
            states[i, ...] = frames[np.mod(index + 1, len(frames))]
        return trained(model, optimizer, x + torch.ByteTensor(states).float() / 255.0)

    def grown(number: int) -> None:
        frames.append(np.full(4, 7 * number, dtype=np.uint8))

    return Loop(step, lambda: [model, len(frames)], grown)


def by_what_the_graph_gives() -> Loop:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []

    def step(number: int, x: torch.Tensor) -> float:
        loss = trained(model, optimizer, x)
        found = np.empty(3)
        found[0], found[1:] = loss.item(), [x.mean().item(), x.max().item()]
        alike = np.empty_like(found)
        alike[:] = found * 2
        seen.append(alike.sum())
        return float(found.mean())

    return Loop(step, lambda: [model, *map(float, seen)])


def as_a_tensor() -> Loop:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: torch.Tensor) -> torch.Tensor:
        order = np.empty((3,), dtype=np.int64)
        order[...] = [2, 0, 1]
        return trained(model, optimizer, x[torch.from_numpy(order)])

    return Loop(step, lambda: model)


@pytest.mark.parametrize("make", [by_drawn_places, by_what_the_graph_gives, as_a_tensor])
def test_every_call_is_eager_s(make: Callable[[], Loop]) -> None:
    graphs_of(make, calls=5)
