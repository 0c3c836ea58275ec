"""Lists in an object among the arguments that holds tensors as well."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

Body = Callable[[Any, Tensor], Any]


def appended(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())


def rows(s: Any, loss: Tensor) -> None:
    s.losses.append((s.steps, loss.item()))
    s.steps += 1


def tensors(s: Any, loss: Tensor) -> None:
    s.losses.append((1.0, loss.detach()))


def rows_of_a_dictionary(s: Any, loss: Tensor) -> None:
    s.tables["known"].append({"loss": loss.item()})


def trimmed(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = s.losses[-2:]


def cleared(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.known.clear()


def put_elsewhere(s: Any, loss: Tensor) -> None:
    s.tables["known"] = s.known
    s.known.append(loss.item())


def swapped(s: Any, loss: Tensor) -> None:
    s.tables["known"], s.known = s.known, s.tables["known"]


def run(body: Body, compiled: bool) -> list[Any]:
    """What is in the object behind each call."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    s = SimpleNamespace(losses=[], known=[1.0, 2.0], tables={"known": [0.5]}, steps=0)
    s.scale = torch.ones(())

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, s: Any) -> None:
        loss = model(x).square().mean() * s.scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        body(s, loss)

    step: Any = graphopt.compile(train, pipeline="none") if compiled else train
    found = []
    for _ in range(4):
        step(model, optimizer, torch.randn(4, 3), s)
        one = s.known is s.tables["known"]
        found.append((list(s.losses), list(s.known), list(s.tables["known"]), s.steps, one))
    return found


@pytest.mark.parametrize(
    "body",
    [*(appended, rows, tensors, rows_of_a_dictionary, trimmed, cleared), *(put_elsewhere, swapped)],
)
def test_each_call_changes_what_is_there(body: Body) -> None:
    assert run(body, True) == run(body, False)
