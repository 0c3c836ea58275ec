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
