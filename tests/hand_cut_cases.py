"""Models divided by hand: modules whose results are the arguments of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, MICROBATCHES = 3, 8, 4


class Scaled(torch.autograd.Function):
    """Doubles, with a gradient that is not that of doubling."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 5


class Plain(nn.Module):
    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        self.index, self.last = index, last
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu()


class Several(Plain):
    """Passes on several tensors, one of them of integers, one transposed, and one received."""

    def forward(self, *received: Tensor) -> Any:
        x = received[0]
        y = self.linear(x.T if self.index else x)
        order = y.detach().argmax(1)
        if self.last:
            return {"out": y * received[2] + received[1][:, None], "rest": [order]}
        return y.T, order, received[2] if self.index else x


class Frozen(Plain):
    """The first two have nothing to train, and the gradient of a function is its own."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__(index, last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.requires_grad_(index > 1 or last)

    def forward(self, x: Tensor, total: Tensor | None = None) -> Any:
        y: Tensor = Scaled.apply(self.norm(self.linear(x)))
        return y if self.last else (y, x.detach().sum(1))


class Unread(Plain):
    """The second argument is not read."""

    def forward(self, x: Tensor, unread: Tensor | None = None) -> Any:
        y = self.linear(x)
        return y if self.last else (y, y.exp())


class Branches(Plain):
    """Cannot be captured: what it does depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.sin() if y.sum() > 0 else y.cos()


CASES: dict[str, Callable[[int, bool], nn.Module]] = {
    "plain": Plain,
    "several": Several,
    "frozen": Frozen,
    "unread": Unread,
}


def modules(name: str, stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [CASES[name](index, index == stages - 1) for index in range(stages)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    rows = ROWS * MICROBATCHES
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["out"] if isinstance(output, dict) else output, target)


def examples(name: str, stages: int) -> list[tuple[Tensor, ...]]:
    """What each stage receives."""
    received: tuple[Tensor, ...] = (batch()[0][:ROWS],)
    found = []
    for module in modules(name, stages):
        found.append(tuple(value.detach() for value in received))
        result = module(*received)
        received = result if isinstance(result, tuple) else (result,)
    return found


def reference(name: str, stages: int, *, backwards: bool = False) -> dict[str, Tensor]:
    """State and gradients of the whole model in one process: the mean over microbatches.

    `backwards`: the gradients of the last microbatch come first.
    """
    chain = modules(name, stages)
    x, target = batch()
    losses = []
    for rows, wanted in zip(x.split(ROWS), target.split(ROWS), strict=True):
        value: Any = (rows,)
        for module in chain:
            value = module(*value) if isinstance(value, tuple) else module(value)
        losses.append(loss(value, wanted))
    for result in reversed(losses) if backwards else losses:
        result.backward()
    return state(dict(enumerate(chain)), MICROBATCHES)


def state(chain: dict[int, nn.Module], count: int = 1) -> dict[str, Tensor]:
    """By name: buffers, and gradients divided by `count`; a missing gradient is one of zeros."""
    found = {}
    for index, module in chain.items():
        for name, parameter in module.named_parameters():
            gradient = parameter.grad
            found[f"{index}.{name}"] = (
                torch.zeros_like(parameter) if gradient is None else gradient / count
            )
        found |= {f"{index}.{name}": buffer for name, buffer in module.named_buffers()}
    return found
