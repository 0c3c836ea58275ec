"""Indices of tensors with numbers that are known only when a call begins, or when the step runs:
random crops, windows of a text, a queue's pointer. One graph serves all positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

ROWS, COLUMNS = 40, 6
HIGH = ROWS - 8


def set_in(x: Tensor, key: Any) -> Tensor:
    x = x.clone()
    x[key] = 0.5
    return x


def added_in(x: Tensor, key: Any) -> Tensor:
    x = x.clone()
    x[key] += 1
    return x


DRAWS: dict[str, Callable[[], Any]] = {
    "item": lambda: torch.randint(0, HIGH, (1,)).item(),
    "int": lambda: int(torch.randint(0, HIGH, (1,))),
    "tensor": lambda: torch.randint(0, HIGH, ()),
    "list": lambda: torch.randint(0, HIGH, (2,)).tolist()[0],
}
USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "row": lambda x, i: x[i],
    "window": lambda x, i: x[i : i + 5],
    "two windows": lambda x, i: x[i : i + 5] - x[i + 1 : i + 6],
    "product": lambda x, i: x[i // 8 * 8 : (i // 8 + 1) * 8],
    "crop": lambda x, i: x[None, i : i + 4, None, 1:3],
    "column": lambda x, i: x.t()[..., i],
    "among tensors": lambda x, i: x.t()[torch.tensor([0, 2]), i],
    "behind a mask": lambda x, i: x.expand(2, *x.shape)[torch.tensor([True, False]), i],
    "set": lambda x, i: set_in(x, i),
    "set window": lambda x, i: set_in(x, slice(i, i + 3)),
    "added": lambda x, i: added_in(x, (i, slice(1, 3))),
}
OF_NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "narrow": lambda x, i: x.narrow(0, i, 4),
    "keyword": lambda x, i: torch.narrow(x, 0, start=i, length=4),
    "roll": lambda x, i: torch.roll(x, (i, 1), (0, 1)),
    "select": lambda x, i: x.select(0, i),
    "cut out": lambda x, i: set_in(x, slice(max(i - 3, 0), min(i + 3, ROWS))),
}
CASES = {f"{use}-{draw}": (draw, USES[use]) for draw in DRAWS for use in USES}


def trained(use: Callable[[Tensor], Tensor], wrap: Callable[[Any], Any], calls: int = 5) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, COLUMNS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(ROWS, COLUMNS)

    @wrap
    def step() -> Tensor:
        found = use(model(data))
        loss = found.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return found.detach()

    found = [step() for _ in range(calls)]
    state = torch.get_rng_state()
    return [*found, *model.parameters()], state, step


def is_eager_s(use: Callable[[Tensor], Tensor], graphs: int = 1, calls: int = 5) -> None:
    eager, state, _ = trained(use, lambda step: step, calls)
    ours, our_state, step = trained(use, graphopt.compile, calls)
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    assert torch.equal(state, our_state)
    assert len(step.captures) == graphs


@pytest.mark.parametrize("case", CASES)
def test_one_graph_serves_all_positions(case: str) -> None:
    draw, use = CASES[case]
    is_eager_s(lambda x: use(x, DRAWS[draw]()))


@pytest.mark.parametrize("use", [*USES, *OF_NUMBERS])
def test_one_graph_serves_all_arguments(use: str) -> None:
    """Positions that are given to the step, as by a loop over batches."""
    model, data = nn.Linear(COLUMNS, COLUMNS), torch.randn(ROWS, COLUMNS)
    of = {**USES, **OF_NUMBERS}[use]

    def step(i: int) -> Tensor:
        return of(model(data), i).detach()

    compiled = graphopt.compile(step)
    for i in (2, 5, 3, 4):
        assert torch.equal(compiled(i), step(i))
    assert len(compiled.captures) <= 2


def test_a_window_at_the_end_is_another_graph() -> None:
    lasts = [0, 3, ROWS - 2, 7, ROWS - 2]
    eager, ours = (windows(lasts, wrap) for wrap in (lambda step: step, graphopt.compile))
    assert all(torch.equal(a, b) for a, b in zip(eager[0], ours[0], strict=True))
    assert len(ours[1].captures) == 2


def windows(begins: list[int], wrap: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, COLUMNS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(ROWS, COLUMNS)

    @wrap
    def step(i: int) -> Tensor:
        length = min(9, len(data) - 1 - i)
        error = model(data[i : i + length]) - data[i + 1 : i + 1 + length]
        loss = error.square().mean() + model(data[i]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [step(i) for i in begins], step


def test_windows_of_an_argument_are_as_long_in_each_graph() -> None:
    begins = [*range(0, ROWS - 1, 9)] * 2
    eager, ours = (windows(begins, wrap) for wrap in (lambda step: step, graphopt.compile))
    assert all(torch.equal(a, b) for a, b in zip(eager[0], ours[0], strict=True))
    assert len(ours[1].captures) == 2  # the last window is shorter


def test_a_position_that_is_not_there_is_eager_s_error() -> None:
    _, step = windows([3], graphopt.compile)
    with pytest.raises((CaptureError, IndexError), match=r"IndexError|out of range"):
        step(ROWS + 8)
    eager, ours = (windows([3, 4], wrap)[0] for wrap in (lambda step: step, graphopt.compile))
    assert torch.equal(eager[1], ours[1])


class Queue(nn.Module):
    """MoCo's, with its pointer in a buffer."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.encode = nn.Linear(COLUMNS, 3)
        self.register_buffer("rows", torch.randn(3, size))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.encode(x)
        found = keys @ self.rows.clone()
        with torch.no_grad():
            at = int(self.pointer)
            assert self.rows.shape[1] % len(keys) == 0
            self.rows[:, at : at + len(keys)] = keys.T
            self.pointer[0] = (at + len(keys)) % self.rows.shape[1]
        return found


@pytest.mark.parametrize("lower", [None, "inductor"])
def test_a_queue_with_its_pointer(lower: Any) -> None:
    def trained(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = Queue()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @wrap
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = [step(torch.randn(4, COLUMNS)) for _ in range(7)]
        return [*found, *model.state_dict().values()], step

    eager, _ = trained(lambda step: step)
    ours, step = trained(lambda step: graphopt.compile(step, lower=lower))
    torch.testing.assert_close(eager, ours, rtol=1e-5 if lower else 0, atol=1e-6 if lower else 0)
    assert len(step.captures) == 1
