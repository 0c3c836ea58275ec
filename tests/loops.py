"""Steps that a program calls several times, against eager: a step is made anew for each run, and
what it returns, prints and leaves is compared after every call."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

import graphopt


class Loop(NamedTuple):
    """A step with its world.

    Attributes:
        step: takes the number of a call and a batch.
        left: what the program finds after a call.
        before: what the program does before a call, given its number.
    """

    step: Callable[[int, Tensor], Any]
    left: Callable[[], Any]
    before: Callable[[int], Any] = lambda number: None


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """One step of training. Returns the loss."""
    loss: Tensor = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def told(value: Any) -> Any:
    """A value as something that is compared, with all types."""
    if isinstance(value, nn.Module):
        return [(name, told(p), told(p.grad)) for name, p in value.named_parameters()]
    if isinstance(value, Tensor):
        bits = value.detach().contiguous().numpy().tobytes()
        return value.dtype, tuple(value.shape), value.requires_grad and value.is_leaf, bits
    if isinstance(value, dict):
        return [(key, told(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [told(each) for each in value]
    return type(value).__name__, value


def run(make: Callable[[], Loop], calls: int, compiled: bool) -> tuple[list[Any], int]:
    """All that is seen of a loop, and how many graphs it needs."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    loop, found = make(), []
    step: Any = graphopt.compile(loop.step) if compiled else loop.step
    for number in range(calls):
        loop.before(number)
        batch = torch.randn(3, 4) * (0.1 + number % 3)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            returned = step(number, batch)
        found.append((told(returned), told(loop.left()), said.getvalue()))
    return found, len(step.captures) if compiled else 0


def graphs_of(make: Callable[[], Loop], calls: int = 8) -> int:
    """How many graphs a loop needs, which does what eager code does."""
    expected, _ = run(make, calls, compiled=False)
    found, graphs = run(make, calls, compiled=True)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, f"call {number}"
    return graphs
