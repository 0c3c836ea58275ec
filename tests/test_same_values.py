"""A value of another type, or with the other sign of a zero, is another one than was captured."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphopt
from graphopt.ir.same_values import same_value

NUMBERS = st.one_of(st.floats(), st.integers(-2, 2), st.booleans(), st.sampled_from([0.0, -0.0]))


def written(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(written, value))
    if value != value:
        return "NaN"
    return struct.pack("d", value) if type(value) is float else (type(value), value)


@given(st.lists(NUMBERS, max_size=2).map(tuple) | NUMBERS, st.lists(NUMBERS, max_size=2).map(tuple))
def test_values_are_the_same_where_they_are_written_alike(one: Any, other: Any) -> None:
    for a, b in ((one, other), (one, one), (other[:1], tuple(map(float, other[:1])))):
        assert same_value(a, b, lambda value: True) == (written(a) == written(b))


PLACES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "attribute of the model": lambda model, optimizer, held: model.scale,
    "tuple of the model": lambda model, optimizer, held: model.pair[0],
    "dictionary of the model": lambda model, optimizer, held: model.table["scale"],
    "setting of the optimizer": lambda model, optimizer, held: optimizer.param_groups[0]["scale"],
    "attribute of the optimizer": lambda model, optimizer, held: optimizer.scale,
    "object outside": lambda model, optimizer, held: held.scale,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_step_goes_on_with_the_value_of_the_call(place: str) -> None:
    def run(compiled: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        held = SimpleNamespace()

        @compiled
        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return torch.ones(1) * PLACES[place](model, optimizer, held)

        found = []
        for value in (0.0, -0.0, 0, True, 1, 1.0, float("nan"), 0.0):
            model.scale = optimizer.scale = held.scale = value
            model.pair, model.table = (value, 1), {"scale": value}
            optimizer.param_groups[0]["scale"] = value
            result = step(model, optimizer, torch.ones(1, 2))
            found.append((repr(result.item()), result.dtype))
        return found

    assert run(lambda fn: fn) == run(graphopt.compile)
