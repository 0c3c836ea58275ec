"""A weight that layers share, which an optimizer or a list operator is given twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from loops import Loop, graphs_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains")

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "plain": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
    "momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(
        p, lr=0.1, initial_accumulator_value=0.1, **how
    ),
    "rmsprop": lambda p, **how: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, **how),
    "asgd": lambda p, **how: torch.optim.ASGD(p, lr=0.1, **how),
}


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.encoder(x).tanh())
        return y


def training(make: Make, **how: Any) -> Loop:
    """As programs write it that put the parameters of an encoder and a decoder together."""
    model = Shared()
    parameters = [*model.encoder.parameters(), *model.decoder.parameters()]
    optimizer = make(parameters, **how)
    return Loop(
        lambda number, x: trained(model, optimizer, x), lambda: [model, optimizer.state_dict()]
    )


@pytest.mark.parametrize("how", [{}, {"foreach": False}], ids=["default", "one by one"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_it_twice(name: str, how: dict[str, Any]) -> None:
    assert graphs_of(lambda: training(OPTIMIZERS[name], **how), calls=4) <= 2


@pytest.mark.parametrize("name", ["plain", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_operators_of_all_parameters_at_once_are_refused(name: str, how: str) -> None:
    """What stands second in a list is updated from what the first has become; a graph of values
    would not know."""
    with pytest.raises(CaptureError, match="stands in its lists twice") as refused:
        graphs_of(lambda: training(OPTIMIZERS[name], **{how: True}), calls=2)
    assert "foreach=False" in str(refused.value) and "loops.py" in str(refused.value)


def swapped(x: Tensor, y: Tensor) -> None:
    torch._foreach_add_([x, y], [y, x])


def overlapping(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x[:2], x[1:]], [y[0], y[1]])


def its_own_norm(x: Tensor, y: Tensor) -> None:
    torch._foreach_div_([x, y], [x.detach(), x.detach()])


@pytest.mark.parametrize("change", [swapped, overlapping, its_own_norm])
def test_entries_that_read_what_others_write_are_refused(
    change: Callable[[Tensor, Tensor], None],
) -> None:
    def step(x: Tensor) -> Tensor:
        y = x.cos()
        change(x, y)
        return y

    with pytest.raises(CaptureError, match="stands in its lists twice"):
        graphopt.compile(step)(torch.randn(3, 3))


def parts_of_one(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x[:1], x[1:]], [y[0], y[1:]])


def with_itself(x: Tensor, y: Tensor) -> None:
    torch._foreach_mul_([x, y], [x.detach(), y.detach()])


def read_twice(x: Tensor, y: Tensor) -> None:
    torch._foreach_addcmul_([x], [y], [y])
    torch._foreach_add_([x, x.exp()], [y, y])


@pytest.mark.parametrize("change", [parts_of_one, with_itself, read_twice])
def test_entries_apart_are_captured(change: Callable[[Tensor, Tensor], None]) -> None:
    def step(x: Tensor) -> Tensor:
        y = x.cos()
        change(x, y)
        return x * y

    inputs = torch.randn(3, 3)
    expected_input = inputs.clone()
    expected = step(expected_input)
    assert torch.equal(graphopt.compile(step)(inputs), expected)
    assert torch.equal(inputs, expected_input)
