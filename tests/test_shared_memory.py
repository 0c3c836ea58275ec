"""Arrays in the memory of tensors (`tensor.numpy()`), and updates of these tensors in one step,
against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Step = Callable[[nn.Module, Any, Tensor], Any]


def train(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def written_before(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    score = model(x).detach()
    score -= score.mean()
    score[0] = 0
    return score.numpy(), np.mean(score.cpu().numpy())


def of_new_weights(model: Any, optimizer: Any, x: Tensor) -> Any:
    before = np.linalg.norm(model.weight.detach().numpy())
    train(model, optimizer, x)
    return before, np.linalg.norm(model.weight.data.numpy()), model.weight.grad.numpy().sum()


def in_a_loop(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    total, said = torch.zeros(4), []
    for row in model(x).detach():
        total += row
        said.append((total.numpy().sum(), total.numpy().copy(), f"{total.numpy()}"))
    return said


def kept_as_it_is_at_the_end(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    score = model(x).detach()
    array, mean = score.numpy(), score.numpy().mean()
    score.data.mul_(2)
    return array, mean


def tensors_over_arrays(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    score = model(x).detach()
    array = score.numpy()
    mean, copy = array.mean(), array.copy()
    other, apart = torch.from_numpy(array), torch.from_numpy(copy)
    other.mul_(2)
    apart.add_(1)
    return score, other, apart, mean, copy, torch.tensor(array), torch.as_tensor(array)


def over_weights(model: Any, optimizer: Any, x: Tensor) -> Any:
    weight = torch.from_numpy(model.weight.detach().numpy())
    copy = torch.tensor(model.weight.detach().numpy())
    train(model, optimizer, x)
    return weight - model.weight.detach(), copy - model.weight.detach()


def moved(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    score = model(x).detach()
    array = score.numpy()
    score.data = score * 2
    score.mul_(3)
    return array, torch.from_numpy(array), score


def decides_before(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
    score = model(x).detach()
    factor = 2 if score.numpy().sum() > 0 else 3
    score.mul_(factor)
    return score


EXACT: list[Step] = [
    written_before,
    of_new_weights,
    in_a_loop,
    kept_as_it_is_at_the_end,
    tensors_over_arrays,
    over_weights,
    moved,
    decides_before,
]


def run(function: Step, compiled: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Any:
        return function(model, optimizer, x)

    used: Any = graphopt.compile(step) if compiled else step
    torch.set_printoptions(precision=9)
    try:
        return [repr(used(x)) for x in torch.randn(4, 5, 4)]
    finally:
        torch.set_printoptions(precision=4)


@pytest.mark.parametrize("function", EXACT)
def test_arrays_are_what_eager_code_finds(function: Step) -> None:
    assert run(function, True) == run(function, False)


def uses_it_behind(score: Tensor, array: Any) -> Any:
    score.sub_(1)  # here
    return array.sum()


def by_data(score: Tensor, array: Any) -> Any:
    score.data[0].zero_()  # here
    return f"{array}"


def a_part(score: Tensor, array: Any) -> Any:
    part = array[1:]
    torch.add(score, 1, out=score)  # here
    return part


def decides_behind(score: Tensor, array: Any) -> Any:
    score.mul_(2)  # here
    return score if array.any() else None


def by_a_tensor_over_it(score: Tensor, array: Any) -> Any:
    torch.from_numpy(array).mul_(2)  # here
    return array.max()


def by_a_callback(score: Tensor, array: Any) -> Any:
    score.mul_(2)  # here
    graphopt.callback(print, array)


@pytest.mark.parametrize(
    "use", [uses_it_behind, by_data, a_part, decides_behind, by_a_tensor_over_it, by_a_callback]
)
def test_an_array_is_not_used_behind_an_update(use: Callable[[Tensor, Any], Any]) -> None:
    model = nn.Linear(4, 4)

    @graphopt.compile
    def step(x: Tensor) -> Any:
        score = model(x).detach()
        return use(score, score.numpy())

    with pytest.raises(CaptureError, match=r"afterwards\n.*# here\n"):
        step(torch.ones(2, 4))


def rows_of(y: Tensor) -> Any:
    array = y.detach().cpu().numpy()
    return [array[i] for i in range(array.shape[0])]


def parts_of_views(y: Tensor) -> Any:
    first = int(y.abs().sum() * 10) % 4
    return y[1:].numpy()[:, 0], y.t().numpy().reshape(-1), y.numpy().T, (y.numpy()[first], y)


def behind_an_update(y: Tensor) -> Any:
    array, row, mean = y.numpy(), y.numpy()[0], y.numpy().mean()
    y.add_(1)
    return array, row, mean


def beside_copies(y: Tensor) -> Any:
    return y.numpy(), y.double().numpy(), y.numpy().astype(np.float64), y.numpy() + 1


@pytest.mark.parametrize("use", [rows_of, parts_of_views, behind_an_update, beside_copies])
def test_arrays_over_an_argument_are_kept_as_such(use: Callable[[Tensor], Any]) -> None:
    """The program changes the argument by the array, and the array by the argument."""

    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, kept, found = nn.Linear(3, 1), [], []

        def step(y: Tensor) -> Any:
            kept.append(use(y) if use is not behind_an_update else y.numpy())
            return model(y).sum().detach(), use(y) if use is behind_an_update else None

        called: Any = graphopt.compile(step) if compiled else step
        batches = [torch.randn(4, 3) for _ in range(3)]
        for batch in (*batches, batches[0]):
            found.append(repr(called(batch)))
            batch.mul_(2)
            found.append(repr(kept))
            arrays = (each for row in kept for each in (row if type(row) is tuple else [row]))
            for array in arrays:
                if isinstance(array, np.ndarray):
                    array += 1
            found.append(repr((kept, batches)))
        return found

    assert run(True) == run(False)


def test_an_array_over_a_parameter_is_not_kept() -> None:
    model = nn.Linear(3, 1)

    @graphopt.compile
    def step(x: Tensor) -> Any:
        return model(x).sum().detach(), model.weight.detach().numpy()[0]

    with pytest.raises(CaptureError, match="none of its arguments"):
        step(torch.ones(2, 3))
