"""Arrays outside a step in whose place it leaves others of another size, as histories grow."""

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


def appended(held: Any, loss: Tensor) -> Any:
    """As the buffers of mmengine: of the graph, and of a count that is known before."""
    held.array = numpy.append(held.array, loss.item())
    held.array = numpy.append(held.array, held.count)
    return held.array.mean(), len(held.array), held.array.tolist()


def a_window(held: Any, loss: Tensor) -> Any:
    held.array = numpy.append(held.array, loss.item())
    if len(held.array) > 3:
        held.array = held.array[-3:]
    print(held.array.sum())


def known_alone(held: Any, loss: Tensor) -> Any:
    before = held.array
    held.array = numpy.concatenate((held.array, [held.count, 1.0]))
    return before.tolist(), held.array[-2]


def at_the_front(held: Any, loss: Tensor) -> Any:
    held.array = numpy.insert(held.array, 0, loss.detach().numpy())
    if held.array[0] > 0.5:
        held.big += 1


def in_some_calls(held: Any, loss: Tensor) -> Any:
    if held.count % 2:
        held.array = numpy.append(held.array, loss.item())
    return held.array.sum()


def used_by_the_graph(held: Any, loss: Tensor) -> Any:
    """Which needs its values before: a graph for each array."""
    weight = torch.from_numpy(held.array).sum()
    held.array = numpy.append(held.array, loss.item())
    return weight * loss.detach()


def changed_in_place(held: Any, loss: Tensor) -> Any:
    held.array = numpy.append(held.array, loss.item())
    held.array[-1] *= 2
    other = held.array
    return float(other[-1])


def left_alone(held: Any, number: int) -> None:
    pass


def another(held: Any, number: int) -> None:
    if number == 2:
        held.array = numpy.ones(5)
    if number == 3:
        held.array[1:3] = 7
    if number == 4:
        held.array = numpy.array([1.0, 2.0], dtype=numpy.float32)


def a_number(held: Any, number: int) -> None:
    if number == 3:
        held.array = numpy.float64(2.5)


@pytest.mark.parametrize("between", [left_alone, another])
@pytest.mark.parametrize(
    ("use", "graphs"),
    [(appended, 1), (a_window, 2), (known_alone, 1), (at_the_front, 3), (in_some_calls, 3),
     (used_by_the_graph, 6), (changed_in_place, 6)],
)  # fmt: skip
def test_each_call_goes_on_with_the_array_that_is_there(
    use: Callable[..., Any], graphs: int, between: Callable[..., None]
) -> None:
    made = graphs_of(lambda: loop(use, between), 6)
    assert made <= graphs + (2 if between is another else 0)


def loop(use: Callable[..., Any], between: Callable[..., None]) -> Loop:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = SimpleNamespace(array=numpy.array([]), count=0, big=0)

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x)
        result = use(held, loss)
        held.count += 1
        return loss, result

    def left() -> Any:
        return [model, str(held.array.dtype), held.array.tolist(), held.count, held.big]

    return Loop(step, left, lambda number: between(held, number))


def test_a_number_in_its_place() -> None:
    def use(held: Any, loss: Tensor) -> Any:
        held.array = numpy.append(held.array, loss.item())

    graphs_of(lambda: loop(use, a_number), 6)


def test_one_in_the_memory_of_the_model_is_refused() -> None:
    model, held = torch.nn.Linear(4, 1), SimpleNamespace(array=numpy.zeros(3))

    @graphopt.compile
    def step(x: Tensor) -> None:
        loss = model(x).sum()
        held.array = numpy.append(held.array, loss.item())

    step(torch.randn(2, 4))
    held.array = model.bias.detach().numpy()
    with pytest.raises(graphopt.CaptureError, match="in the memory of a tensor of the model"):
        step(torch.randn(2, 4))
