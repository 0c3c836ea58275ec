"""Arrays outside a step that it reshapes, and leaves in their place, as the buffers of Stable
Baselines: where numpy has to copy, they are the step's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import graphopt
from loops import Loop, graphs_of, trained

Use = Callable[[Any, Any], Any]


def rollout(number: int, environments: int = 3) -> Any:
    """Observations of an episode."""
    values = numpy.arange(4 * environments * 4, dtype=numpy.float32) * (number + 1) / 7
    return values.reshape(4, environments, 4)


def flattened(array: Any) -> Any:
    return array.swapaxes(0, 1).reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def loop(use: Use, rollouts: Callable[[int], Any] = rollout) -> Loop:
    """A step that trains by what `use` gives of what a program finds anew before each call."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = SimpleNamespace(array=None)
    left = SimpleNamespace(other=None, source=None)

    def before(number: int) -> None:
        if number > 1 and number % 2:
            held.array[:1] = number  # it is an array of the program's own
        left.source = held.array = rollouts(number)

    def step(number: int, x: Tensor) -> Any:
        batch = use(held, left)
        return trained(model, optimizer, torch.tensor(batch))

    def told(array: Any) -> Any:
        if not isinstance(array, numpy.ndarray):
            return array
        return torch.from_numpy(array.copy()), array.strides, array.flags.writeable

    return Loop(
        step, lambda: [model, told(held.array), told(left.source), told(left.other)], before
    )


def kept(held: Any, left: Any) -> Any:
    held.array = flattened(held.array)
    return held.array[numpy.random.permutation(len(held.array))[:5]]


def kept_by_name(held: Any, left: Any) -> Any:
    for name in ("array",):
        vars(held)[name] = flattened(vars(held)[name])
    left.other = held.array[0, 1] + 1
    return held.array


def raveled(held: Any, left: Any) -> Any:
    held.array = held.array.swapaxes(0, 2).ravel()
    return held.array.reshape(-1, 4)


def changed(held: Any, left: Any) -> Any:
    array = flattened(held.array)
    array[1:] *= 2
    array[0] = 5
    held.array = array
    return array


@pytest.mark.parametrize("use", [kept, kept_by_name, raveled, changed])
def test_a_copy_that_numpy_has_made_stays(use: Use) -> None:
    assert graphs_of(lambda: loop(use)) == 1


def changing_layouts(number: int) -> Any:
    """From the third call on, numpy gives a view of the array itself."""
    array = rollout(number)
    return array if number < 3 else numpy.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("use", [kept_by_name, raveled, changed])
@pytest.mark.parametrize(
    "rollouts", [changing_layouts, lambda number: rollout(number, 1), lambda n: rollout(n, 1 + n)]
)
def test_a_view_is_refused_or_as_in_eager_code(use: Use, rollouts: Callable[[int], Any]) -> None:
    with contextlib.suppress(graphopt.CaptureError):
        graphs_of(lambda: loop(use, rollouts), 6)


def kept_twice(held: Any, left: Any) -> Any:
    left.other = held.array = flattened(held.array)
    return held.array


def kept_with_a_part(held: Any, left: Any) -> Any:
    held.array = flattened(held.array)
    left.other = held.array[0]
    return held.array


def kept_with_a_tensor(held: Any, left: Any) -> Any:
    held.array = flattened(held.array)
    left.other = torch.from_numpy(held.array)
    return held.array


def kept_in_other_order(held: Any, left: Any) -> Any:
    held.array = held.array.swapaxes(0, 1).reshape(12, 4, order="F")
    return held.array


def kept_of_none(held: Any, left: Any) -> Any:
    held.array = flattened(held.array[:0])
    left.other = held.array
    return flattened(left.source)


@pytest.mark.parametrize(
    "use", [kept_twice, kept_with_a_part, kept_with_a_tensor, kept_in_other_order, kept_of_none]
)
def test_what_lies_in_its_memory_is_refused_or_as_in_eager_code(use: Use) -> None:
    with contextlib.suppress(graphopt.CaptureError):
        graphs_of(lambda: loop(use), 5)
