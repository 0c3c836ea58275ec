"""Steps that compute with numbers of the device and numpy's: `loss.item() / np.log(2)`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

OVER = 1.0  # a loss between the first call's and the last's


def bits(loss: float) -> Any:
    return loss / np.log(2)


def numpy_first(loss: float) -> Any:
    return np.log(2) * loss, np.float64(1) - loss, np.float64(2) ** loss


def powers(loss: float) -> Any:
    return loss ** np.float64(2), (loss - np.float64(0.5)) ** 2


def by_zero(loss: float) -> Any:
    return loss / np.float64(0.0)


def signs(loss: float) -> Any:
    return abs(np.float64(-2.0) * loss), -(loss + np.float64(1))


def shown(loss: float) -> Any:
    return f"{loss / np.log(2):.4f}", str(np.log(2) * loss), round(loss / np.log(2), 3)


def compared(loss: float) -> Any:
    return loss > np.float64(OVER), np.float64(OVER) > loss, loss == np.float64(OVER)


def decided(loss: float) -> Any:
    return "over" if loss > np.float64(OVER) else "under"


def in_a_function(loss: float) -> Any:
    return math.sqrt(loss * np.float64(2)), -10.0 * np.log(loss) / np.log(10.0)


def outcomes(step: Any) -> list[tuple[str, list[str]]]:
    result = []
    for size in (0.3, 0.9, 1.8, 3.6):
        given = step(torch.full((2, 3), size))
        parts = given if isinstance(given, tuple) else (given,)
        result.append((repr(given), [type(part).__name__ for part in parts]))
    return result


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize(
    "use",
    [bits, numpy_first, powers, by_zero, signs, shown, compared, decided, in_a_function],
    ids=lambda use: use.__name__,
)
def test_a_read_number_and_numpys_make_what_they_make_in_the_original(use: Any) -> None:
    def training() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> Any:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return use(loss.item())

        return step

    run = graphopt.compile(training())
    assert outcomes(run) == outcomes(training())
    assert len(run.captures) <= 2
