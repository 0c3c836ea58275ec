"""Numbers that a step reads from tensors and rounds, counts, compares and looks up.

Each case is compared with eager over six calls, with the kinds of what it keeps; and each says how
many graphs it may take, for a graph for each number would end at `max_graphs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import ceil, exp, floor, isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Kept = list[Any]
Effect = Callable[[Tensor, Tensor, Kept], Any]


def run(effect: Effect, compiled: bool, broken: int | None = None) -> tuple[list[Any], Kept, int]:
    """Six calls: what each returns or raises and leaves of a weight, what is kept, and the graphs.

    Args:
        broken: the call in which an input is 0, and another is no number.
    """
    torch.manual_seed(0)
    model, all_kept = nn.Linear(4, 4), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        kept: Kept = []
        loss = model(x).pow(2).mean()
        factor = effect(loss, x, kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss if factor is None else loss * factor, tuple(kept)

    used: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for call in range(6):
        x = torch.randn(3, 4)
        if call == broken:
            x[0, 0], x[0, 1] = 0.0, math.nan
        try:
            loss, kept = used(x)
            found.append(loss.item())
            all_kept.extend(kept)
        except (ValueError, OverflowError, ZeroDivisionError) as error:
            found.append((type(error), str(error)))
        found.append(model.weight.detach().tolist())
    return found, [(type(each), each) for each in all_kept], len(used.captures) if compiled else 0


KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "int of a tensor": lambda loss, x: int(loss.detach() * 100),
    "int of a number": lambda loss, x: int(loss.item() * 100),
    "negative": lambda loss, x: int(-loss.detach() * 100),
    "beyond 64 bits": lambda loss, x: int(loss.detach() * 1e30),
    "half precision": lambda loss, x: int(loss.detach().half() * 100),
    "in arithmetic": lambda loss, x: int(loss.detach() * 100) % 7 + (int(loss.item() * 99) // 3),
    "divided": lambda loss, x: int(loss.detach() * 100) / 3,
    "shifted": lambda loss, x: int(loss.detach() * 100) << 1,
    "twice": lambda loss, x: int(loss.item() * 10),
    "a float again": lambda loss, x: float(int(loss.item() * 10)),
    "floor": lambda loss, x: math.floor(loss.item() * 100),
    "floor by name": lambda loss, x: floor(loss.detach() * 100),
    "ceil of a tensor": lambda loss, x: ceil(loss.detach() * 100),
    "trunc": lambda loss, x: math.trunc(loss.item() * 100),
    "is an integer": lambda loss, x: isinstance(math.floor(loss.item() * 100), int),
    "rounded is an integer": lambda loss, x: isinstance(round(loss.item() * 100), int),
    "digits are a float": lambda loss, x: isinstance(round(loss.item() * 100, 1), int),
    "rounded": lambda loss, x: round(loss.item() * 100),
    "rounded, None": lambda loss, x: round(loss.item() * 100, None),
    "rounded to even": lambda loss, x: round(round(loss.item()) + 0.5),
    "digits": lambda loss, x: round(loss.item(), 2),
    "no digits": lambda loss, x: round(loss.item() * 1234, 0),
    "tens": lambda loss, x: round(loss.item() * 1234, -2),
    "exp of a tensor": lambda loss, x: math.exp(loss.detach()),
    "exp by name": lambda loss, x: exp(loss.detach()),
    "of an integer tensor": lambda loss, x: math.sqrt((x > 0).sum()),
    "pow": lambda loss, x: math.pow(loss.detach(), 2),
    "truth": lambda loss, x: int((loss.detach() > 0.3).item()),
    "truth of numbers": lambda loss, x: int(loss.item() > 0.3),
    "truth as a float": lambda loss, x: float(loss.item() > 0.3),
    "truths counted": lambda loss, x: sum([loss.item() > 0.3, (x.mean() > 0).item()]),
    "truth added": lambda loss, x: 1 + (loss.item() > 0.3) * 3 - (x.mean() > 0).item(),
    "truth negated": lambda loss, x: -(loss.item() > 0.3),
    "root of a count": lambda loss, x: math.sqrt(int((x > 0).sum())),
    "quotient and rest": lambda loss, x: divmod(int((x > 0).sum()), 3),
    "power": lambda loss, x: 2 ** int((x > 0).sum()),
}


def test_what_is_made_of_numbers_takes_one_graph_together() -> None:
    def effect(loss: Tensor, x: Tensor, kept: Kept) -> Any:
        for make in KEPT.values():
            kept.append(make(loss, x))
        return sum(compute(loss, x, kept) for compute in COMPUTED.values())

    expected, found = run(effect, False), run(effect, True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


@pytest.mark.full
@pytest.mark.parametrize("name", KEPT)
def test_what_is_made_of_a_number_takes_one_graph(name: str) -> None:
    def effect(loss: Tensor, x: Tensor, kept: Kept) -> None:
        kept.append(KEPT[name](loss, x))

    expected, found = run(effect, False), run(effect, True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


COMPUTED: dict[str, Effect] = {
    "factor": lambda loss, x, kept: int(loss.detach() * 100),
    "tensor of it": lambda loss, x, kept: torch.tensor(int(loss.item() * 100)).float(),
    "clamped": lambda loss, x, kept: torch.clamp(x, max=int(loss.detach() * 10)).sum(),
    "compared": lambda loss, x, kept: (x.long() == int(loss.detach() * 10)).sum(),
    "filled": lambda loss, x, kept: x.clone().fill_(int(loss.detach() * 10)).sum(),
    "in a list": lambda loss, x, kept: torch.tensor([int((x > 0).sum()), 0.5]).sum(),
    "chosen": lambda loss, x, kept: torch.where(x > 0, int((x > 0).sum()), 0).sum(),
    "divided": lambda loss, x, kept: (x.long() * 100 // (1 + int((x > 0).sum()))).sum(),
    "of 8 bits": lambda loss, x, kept: (x.to(torch.int8) * int((x > 0).sum())).sum(),
    "by a truth": lambda loss, x, kept: (loss.item() > 0.3) * x.sum(),
    "place": lambda loss, x, kept: x[min(0, int(loss.detach() * 2)), 0],
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMPUTED)
def test_a_tensor_made_of_it_takes_one_graph(name: str) -> None:
    expected, found = run(COMPUTED[name], False), run(COMPUTED[name], True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


DECIDING: dict[str, Effect] = {
    "range": lambda loss, x, kept: sum(map(float, range(int(loss.detach() * 4)))),
    "range of floor": lambda loss, x, kept: sum(map(float, range(math.floor(loss.item() * 4)))),
    "item": lambda loss, x, kept: [1.0, 2.0, 3.0, 4.0][round(loss.item() * 2)],
    "key": lambda loss, x, kept: kept.append(
        {0: "low", 1: "high"}.get(int(loss.item() * 4), "top")
    ),
    "key of a truth": lambda loss, x, kept: {True: 2.0, False: 3.0}[(loss > 0.3).item()],
    "member": lambda loss, x, kept: kept.append(int(loss.item() * 4) in {0, 2}),
    "truths alike": lambda loss, x, kept: (loss > 0.3).item() == (x.mean() > 0).item(),
    "truths apart": lambda loss, x, kept: (loss > 0.3).item() != (x.mean() > 0).item(),
    "truth and a constant": lambda loss, x, kept: kept.append((loss > 0.3).item() == True),  # noqa: E712
    "test of a tensor": lambda loss, x, kept: 1.0 if math.isfinite(loss.detach()) else 0.0,
    "test by name": lambda loss, x, kept: 1.0 if isnan(loss.detach()) else 2.0,
    "whole": lambda loss, x, kept: 2.0 if round(loss.item(), 1).is_integer() else 3.0,
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_by_it_is_eagers(name: str) -> None:
    expected, found = run(DECIDING[name], False), run(DECIDING[name], True)
    assert found[:2] == expected[:2]
    assert found[2] <= 4


RAISING: dict[str, Effect] = {
    "no number": lambda loss, x, kept: int(x[0, 1].item()),
    "no number in a tensor": lambda loss, x, kept: int(x[0, 1]),
    "infinite": lambda loss, x, kept: round((1 / x[0, 0]).item()),
    "floor": lambda loss, x, kept: math.floor(1 / x[0, 0]),
    "zero": lambda loss, x, kept: int(loss.item() / x[0, 0].item()),
    "logarithm": lambda loss, x, kept: round(math.log(abs(x[0, 0])), 2),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_python_refuses_is_raised_before_the_update(name: str) -> None:
    expected, found = run(RAISING[name], False, broken=3), run(RAISING[name], True, broken=3)
    assert isinstance(expected[0][6], tuple)
    assert str(found[:2]) == str(expected[:2])
