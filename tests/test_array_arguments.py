"""Arrays of numpy's among the arguments of a step: each call finds its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

X = torch.arange(32.0).reshape(8, 4) / 10
Use = Callable[[Any], Any]


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.tolist()
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (tuple, dict)):
        return type(value), [*map(described, value.values() if isinstance(value, dict) else value)]
    return type(value), repr(value)


def stepping(
    use: Use, given: Callable[[int], Any], wrap: Callable[[Any], Any], calls: int = 3
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @wrap
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        found = use(batch)
        x = found if isinstance(found, Tensor) and found.shape[-1:] == (4,) else X
        model(x.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    found = []
    for number in range(calls):
        batch = given(number)
        found += [described(step(model, optimizer, batch)), described(batch)]
    return [*found, described(model.weight)], len(getattr(step, "captures", ()))


def check(use: Use, given: Callable[[int], Any], graphs: int = 1, calls: int = 3) -> None:
    expected, _ = stepping(use, given, lambda step: step, calls)
    found, captured = stepping(use, given, graphopt.compile, calls)
    assert found == expected
    assert captured == graphs


def floats(number: int, *shape: int) -> Any:
    generator = numpy.random.default_rng(number)
    return generator.normal(size=shape or (2, 4)).astype(numpy.float32)


def summed(array: Any) -> Any:
    total = 0.0
    for value in array[0]:
        total = total + value
    return X * float(total), len(array), array.shape


USES: dict[str, Use] = {
    "torch.from_numpy": torch.from_numpy,
    "itself": lambda array: array,
    "torch.tensor": torch.tensor,
    "torch.as_tensor": torch.as_tensor,
    "torch.Tensor": lambda array: torch.Tensor(array),
    "torch.FloatTensor": lambda array: torch.FloatTensor(array),
    "other kind": lambda array: torch.HalfTensor(array).float(),
    "normalized": lambda array: torch.tensor((array - array.mean()) / (array.std() + 1e-8)),
    "number": lambda array: X * float(array.sum()),
    "gone through": summed,
    "decided": lambda array: X * 2 if array.shape[0] == 2 and type(array) is numpy.ndarray else X,
    "computed": lambda array: (X, array + 1),
    "unused": lambda array: X,
}


@pytest.mark.parametrize("use", USES)
def test_one_graph_serves_all_arrays(use: str) -> None:
    check(USES[use], floats)


def with_ones(index: Any) -> Any:
    x = X.clone()
    x[index] = 1.0
    return x[index] + x[index, :]


KEYS: dict[str, Callable[[int], Any]] = {
    "integers": lambda number: numpy.random.default_rng(number).permutation(8)[:3],
    "small integers": lambda number: (numpy.arange(3) + number).astype(numpy.int32),
    "bools": lambda number: numpy.arange(8) > number,
    "two dimensions": lambda number: numpy.arange(4).reshape(2, 2) + number,
}


@pytest.mark.parametrize("key", KEYS)
def test_an_array_may_index_a_tensor(key: str) -> None:
    check(with_ones, KEYS[key])


OTHERS: dict[str, tuple[Use, Callable[[int], Any], int]] = {
    "in a nest": (
        lambda batch: torch.from_numpy(batch["x"]) * batch["y"][0].mean(),
        lambda number: {"x": floats(number), "y": (floats(number, 3),)},
        1,
    ),
    "shapes": (torch.from_numpy, lambda number: floats(number, 2 + number % 2, 4), 2),
    "dtypes": (torch.from_numpy, lambda number: floats(number).astype("f8" if number else "f4"), 2),
    "by columns": (torch.from_numpy, lambda number: floats(number, 4, 2).T, 1),
    "gaps": (torch.as_tensor, lambda number: floats(number, 4, 8)[::2, ::2], 1),
    "no dimension": (lambda array: X * float(array) + array.item(), numpy.array, 1),
    "scalar": (lambda scalar: X * scalar, numpy.float32, 1),
    "views of one": (
        lambda pair: torch.from_numpy(pair[0]) * torch.tensor(pair[1]),
        lambda number: (lambda array: (array[:2], array[1:]))(floats(number, 3, 4)),
        1,
    ),
    "the same twice": (
        lambda pair: (pair[0] is pair[1], torch.tensor(pair[0])),
        lambda number: (lambda array: (array, array.copy() if number else array))(floats(number)),
        2,
    ),
    "text": (lambda array: (X, str(array)), floats, 1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_kinds_and_places(case: str) -> None:
    use, given, graphs = OTHERS[case]
    check(use, given, graphs)


def test_an_array_that_the_program_changes_in_place() -> None:
    def changing() -> Callable[[int], Any]:
        array = floats(0)

        def given(number: int) -> Any:
            array[:] += number
            return array

        return given

    expected, _ = stepping(torch.from_numpy, changing(), lambda step: step)
    found, captured = stepping(torch.from_numpy, changing(), graphopt.compile)
    assert found == expected and captured == 1


def test_an_array_in_a_file(tmp_path: Path) -> None:
    def given(number: int) -> Any:
        array = numpy.memmap(tmp_path / str(number), "float32", "w+", shape=(2, 4))
        array[:] = floats(number)
        return array

    check(torch.from_numpy, given)


def written(array: Any) -> Any:
    array[0] = 1.0  # HERE
    return X * float(array.sum())


def written_by_tensor(array: Any) -> Any:
    return torch.from_numpy(array).mul_(2)


def beside_a_tensor(array: Any) -> Any:
    return X * array  # HERE


REFUSED = {
    written: "writes into it",
    written_by_tensor: "updates a tensor in place",
    beside_a_tensor: "computes with it and a tensor",
}


@pytest.mark.parametrize("use", REFUSED)
def test_refused(use: Use) -> None:
    given = floats if use is written_by_tensor else lambda number: numpy.arange(4.0)
    with pytest.raises(CaptureError, match=REFUSED[use]):
        stepping(use, given, graphopt.compile)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_arrays_over_tensors_are_refused(first: bool, of_model: bool) -> None:
    model = nn.Linear(4, 2)

    @graphopt.compile
    def step(model: nn.Module, x: Tensor, array: Any) -> Any:
        x.add_(1)
        return model(x), float(array.sum())

    def call(shared: bool) -> None:
        array = floats(0)
        x = torch.from_numpy(array[1:]) if shared and not of_model else torch.ones(1, 4)
        step(model, x, model.weight.detach().numpy() if shared and of_model else array)

    if not first:
        call(False)
    with pytest.raises(CaptureError, match="lies in the memory of a tensor"):
        call(True)


def test_arrays_that_a_step_makes_become_tensors_of_any_class() -> None:
    def made(x: Tensor) -> Any:
        ones, integers = numpy.ones((2, 4)), numpy.arange(3)
        return torch.Tensor(ones) * x.sum(), torch.ShortTensor(integers), torch.HalfTensor(ones)

    check(made, lambda number: X + number)
