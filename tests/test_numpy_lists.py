"""Functions of numpy's that a step gives lists of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Function = Callable[[list[float]], Any]


def run(function: Function, compiled: bool, known: bool) -> tuple[list[str], int]:
    """What each call gives and keeps, as text, which shows the class as well."""
    torch.manual_seed(0)
    model, kept, scale = nn.Linear(4, 1), list[Any](), [0.1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scale[0] = scale[0] * 1.1 + 0.01
        if known:
            numbers = [scale[0] * (index + 1.3) for index in range(20)]
        else:
            numbers = [(x[index % 5, index % 4] * (index + 1.37)).item() for index in range(20)]
        found = function(numbers)
        kept.append(found)
        return found

    used: Any = graphopt.compile(step) if compiled else step
    found = [repr(used(x)) for x in torch.randn(4, 5, 4)]
    return [*found, repr(kept)], len(used.captures) if compiled else 0


FUNCTIONS: dict[str, Function] = {
    **{f.__name__: f for f in (np.mean, np.sum, np.std, np.var, np.median, np.max, np.average)},
    "of a tuple": lambda numbers: np.mean(tuple(numbers)),
    "float": lambda numbers: float(np.mean(numbers) * 2),
    "item": lambda numbers: np.mean(numbers).item(),
    "round": lambda numbers: round(np.mean(numbers), 3),
    "computed with": lambda numbers: 1.0 - np.min(numbers) / 3 + numbers[0],
    "asked": lambda numbers: isinstance(np.mean(numbers), np.floating),
    "of an array": lambda numbers: np.array(numbers).mean(),
    "along an axis": lambda numbers: np.mean(numbers, axis=0),
    "of another kind": lambda numbers: np.percentile(numbers, 30),
    "of one number": lambda numbers: np.abs(numbers[0]),
    "decided by": lambda numbers: float(np.mean(numbers) > -1e9),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_they_are_numpys_own(function: Function) -> None:
    expected, _ = run(function, False, known=False)
    found, captures = run(function, True, known=False)
    assert found == expected
    assert captures == 1


def test_what_is_computed_from_one_is_not_asked_whether_it_is_numpys() -> None:
    def asks(numbers: list[float]) -> bool:
        return isinstance(np.mean(numbers) * 2, np.floating)

    with pytest.raises(CaptureError, match="isinstance"):
        run(asks, True, known=False)


@pytest.mark.parametrize("function", [np.mean, np.std, np.max, np.linalg.norm, np.cumsum])
def test_they_are_numpys_own_of_known_numbers(function: Function) -> None:
    def of(numbers: list[float]) -> float:
        return float(np.max(function(numbers)))

    assert run(of, True, known=True)[0] == run(of, False, known=True)[0]


@pytest.mark.parametrize("function", [lambda numbers: np.float64(2.0) ** numbers[0]])
def test_others_are_refused(function: Function) -> None:
    with pytest.raises(CaptureError, match="numpy is given the value of a tensor"):
        run(function, True, known=False)


MAKERS: dict[str, Callable[[Any, float, int], Tensor]] = {
    "read": lambda x, drawn, chosen: torch.FloatTensor([x[0, 0].item(), 2.0]),
    "of a tuple": lambda x, drawn, chosen: torch.Tensor((drawn, 1)),
    "nested": lambda x, drawn, chosen: torch.DoubleTensor([[drawn], [x[1, 1].item()]]),
    "integers": lambda x, drawn, chosen: torch.LongTensor((chosen, 3)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_classes_of_tensors_take_numbers_of_the_step(make: Callable[..., Tensor]) -> None:
    def step(model: nn.Module, x: Tensor, drawn: float, chosen: int) -> Tensor:
        return model(x).sum() * make(x, drawn, chosen)

    seen = []
    for wrapped in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        model, given = (
            nn.Linear(4, 1),
            zip(torch.randn(3, 5, 4), (0.2, 0.7, 0.1), (1, 4, 0), strict=True),
        )
        seen.append([wrapped(model, *each) for each in given])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*seen, strict=True))
    assert len(wrapped.captures) == 1
