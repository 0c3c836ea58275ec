"""Recurrent layers whose forward sets a weight: torch keeps their weights in a list besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops import Loop, graphs_of, trained


class WeightDrop(nn.Module):
    """AWD-LSTM's: some recurrent weights are zero in a forward."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5)
        weight = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        raw = self.rnn.weight_hh_l0_raw
        setattr(self.rnn, "weight_hh_l0", F.dropout(1 * raw, 0.5, self.training))  # noqa: B010
        y: Tensor = self.rnn(x.unsqueeze(1))[0]
        return y


def dropping(kind: type[nn.RNNBase]) -> Loop:
    return dropping_of(WeightDrop(kind))


def dropping_of(model: WeightDrop) -> Loop:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def seen() -> Any:
        return [model, model.rnn.weight_hh_l0.detach()]

    return Loop(lambda number, x: trained(model, optimizer, x), seen)


def evaluated_between(kind: type[nn.RNNBase]) -> Loop:
    """The program runs the layer itself, which takes the weight that the last call has left."""
    model: Any = WeightDrop(kind)
    loop, found = dropping_of(model), []

    def evaluate(number: int) -> None:
        if number:
            with torch.no_grad():
                found.append(model.rnn(torch.ones(2, 1, 4))[0].clone())
        if number % 3 == 2:
            model.eval() if model.training else model.train()

    return Loop(loop.step, lambda: [*loop.left(), *found], evaluate)


def set_for_good(kind: type[nn.RNNBase]) -> Loop:
    """A weight that a forward of the program has set, and the step does not."""
    model = WeightDrop(kind)
    with torch.no_grad():
        model(torch.ones(3, 4))
    layer, head = model.rnn, nn.Linear(5, 2)
    layer.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step(number: int, x: Tensor) -> Tensor:
        loss = head(layer(x.unsqueeze(1))[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def anew(number: int) -> None:
        if number % 2:
            with torch.no_grad():
                model(torch.ones(3, 4))

    return Loop(step, lambda: [head, layer.weight_hh_l0.detach()], anew)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("make", [dropping, evaluated_between, set_for_good])
def test_every_call_is_eager_s(make: Any, kind: type[nn.RNNBase]) -> None:
    assert graphs_of(lambda: make(kind), calls=6) <= 4
