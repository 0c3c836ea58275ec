"""Arrays of numpy's on the right of a tensor: numpy computes, as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of, trained

WIDE = np.arange(12, dtype=np.float64).reshape(3, 4) + 0.5
NARROW = WIDE.astype(np.float32)
TURNED = NARROW.T.copy()

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")


def of_numpys_dtype(model: Any, x: Tensor, kept: Any) -> Any:
    return x * WIDE, x + NARROW, (x - NARROW) / NARROW**2, x.double() - NARROW - WIDE * 2


def operators(model: Any, x: Tensor, kept: Any) -> Any:
    chosen = (x > 0) & np.array([True, False, True, True])
    return x // NARROW, x % NARROW, x ** np.array([2, 3, 1, 2]), x @ TURNED, chosen, x == NARROW


def of_the_graph(model: Any, x: Tensor, kept: Any) -> Any:
    """V-trace: a difference of values."""
    with torch.no_grad():
        values = model(x)
        return x.mean(1, keepdim=True) + values - values.numpy(), x @ x.numpy().T


def drawn(model: Any, x: Tensor, kept: Any) -> Any:
    return x * np.random.rand(3, 4)


def that_changes(model: Any, x: Tensor, kept: Any) -> Any:
    kept.noise = kept.noise * 0.5
    return x * kept.noise


def written_behind(model: Any, x: Tensor, kept: Any) -> Any:
    """The result has memory of its own."""
    y = x * NARROW
    y += 1
    y[0] = 0
    return y


def of_a_gradient(model: Any, x: Tensor, kept: Any) -> Any:
    try:
        return model(x) * np.ones(2)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "use",
    [of_numpys_dtype, operators, of_the_graph, drawn, that_changes, written_behind, of_a_gradient],
)
def test_the_results_are_those_of_numpy(use: Callable[..., Any]) -> None:
    def make() -> Loop:
        model, kept = nn.Linear(4, 2), SimpleNamespace(noise=NARROW.copy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            return trained(model, optimizer, x), use(model, x, kept)

        return Loop(step, lambda: [model, kept.noise.tolist()])

    assert graphs_of(make, 5) <= 3
