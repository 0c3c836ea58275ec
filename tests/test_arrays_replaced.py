"""Arrays outside a step in whose place it leaves others, made of what only the graph gives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import graphopt
from loops import Loop, graphs_of, trained


def found(loss: Tensor) -> Any:
    return numpy.array([loss.item(), 1.0])


def added(held: Any, loss: Tensor) -> Any:
    """As the meters of JT-VAE."""
    held.array = held.array + found(loss)
    held.array /= 2
    print("%.3f %s" % (held.array[0], held.array))  # noqa: UP031
    held.array *= 0.5


def from_the_left(held: Any, loss: Tensor) -> Any:
    held.array = found(loss) - 1 / (2 + held.array**2)
    held.array -= found(loss)
    other = held.array
    held.array += 1
    return float(other[0])


def changed_in_place(held: Any, loss: Tensor) -> Any:
    number = float(held.array[0])
    held.array *= 0.9
    held.array += found(loss)
    held.array += 1
    return number


def shown_before(held: Any, loss: Tensor) -> Any:
    before = held.array
    held.array = numpy.maximum(held.array, found(loss))
    print(before, f"{before} {before[1]:.2f} {held.array}")
    return bool((before == held.array).all())


def decided_by(held: Any, loss: Tensor) -> Any:
    held.array = held.array + found(loss)
    if held.array[1] > 3:
        held.array = held.array * 0


def replaced_between(held: Any, number: int) -> None:
    if number == 2:
        held.array = numpy.ones(2)
    if number == 4:
        held.array[0] = 7


@pytest.mark.parametrize("between", [replaced_between, lambda held, number: None])
@pytest.mark.parametrize("use", [added, from_the_left, changed_in_place, shown_before, decided_by])
def test_each_call_goes_on_with_the_array_that_is_there(
    use: Callable[..., Any], between: Callable[..., Any]
) -> None:
    def make() -> Loop:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = SimpleNamespace(array=numpy.zeros(2))

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            return loss, use(held, loss)

        def left() -> Any:
            return [model, held.array.dtype.str, held.array.tolist()]

        return Loop(step, left, lambda number: between(held, number))

    assert graphs_of(make, 6) <= (2 if use is decided_by else 1)


def test_a_variable_of_a_closure_that_holds_an_array() -> None:
    def make() -> Loop:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meters, table = numpy.zeros(2), numpy.zeros(2)
        kept = table

        def step(number: int, x: Tensor) -> Tensor:
            nonlocal meters, table
            loss = trained(model, optimizer, x)
            meters = meters + found(loss)
            meters /= 2
            table += 1
            table *= found(loss)
            return loss

        def before(number: int) -> None:
            nonlocal meters
            if number == 3:
                meters = numpy.ones(2)

        return Loop(step, lambda: [meters.tolist(), table.tolist(), kept.tolist()], before)

    assert graphs_of(make, 6) == 1


def test_texts_of_arrays_that_a_step_draws() -> None:
    def make() -> Loop:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> Any:
            noise = numpy.random.rand(3, 2).astype(numpy.float32)
            print(noise.T, [noise[0], {"k": noise.sum()}])
            print("%s %.3f" % (noise, noise[0, 1]))  # noqa: UP031
            noise[0] = 5
            print(noise)
            return trained(model, optimizer, x), f"{noise} {noise[1, 0]:.2f}"

        return Loop(step, lambda: model)

    assert graphs_of(make, 4) == 1


def test_the_line_that_keeps_an_array_elsewhere_is_named() -> None:
    model = torch.nn.Linear(4, 1)
    held = SimpleNamespace(array=numpy.zeros(2), other=None)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        held.other = held.array
        held.array = held.array + found(loss)
        return loss

    with pytest.raises(graphopt.CaptureError, match=r"held\.other = held\.array"):
        step(torch.ones(2, 4))
