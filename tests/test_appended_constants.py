"""What a step appends in every call and does not compute: values, nests of them that it makes, and
objects that were there before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

NAMES = ["u", "v"]


class Log:
    """Attributes: lists and a queue to append to."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.last: deque[Any] = deque(maxlen=3)
        self.by_name: dict[str, list[Any]] = {"a": []}

    def found(self) -> list[Any]:
        return [list(self.rows), list(self.last), {k: list(v) for k, v in self.by_name.items()}]


APPENDED: dict[str, Callable[[Log, nn.Module, Tensor], object]] = {
    "list": lambda log, model, x: log.rows.append([1, 2]),
    "nothing in a list": lambda log, model, x: log.rows.append([]),
    "none": lambda log, model, x: log.rows.append(None),
    "nest": lambda log, model, x: log.rows.append({"a": 1, "b": [2.5, {"c": None}]}),
    "list in a tuple": lambda log, model, x: log.rows.append((1, ["text"])),
    "several": lambda log, model, x: log.rows.extend([[1], [True]]),
    "to a queue": lambda log, model, x: log.last.append([x.shape[0]]),
    "in a dictionary": lambda log, model, x: log.by_name["a"].append([list(x.shape)]),
    "which have gradients": lambda log, model, x: log.rows.append(
        [p.grad is not None for p in model.parameters()]
    ),
    "beside a tensor": lambda log, model, x: log.rows.extend([[1], x.detach().sum().item()]),
    "numpy number": lambda log, model, x: log.rows.append(np.float32(2)),
    "device": lambda log, model, x: log.rows.append([x.device, x.dtype, slice(0, 2), range(3)]),
    "size": lambda log, model, x: log.rows.append(x.shape),
    "class": lambda log, model, x: log.rows.append(nn.Linear),
    "list from outside": lambda log, model, x: log.rows.append(NAMES),
    "module": lambda log, model, x: log.last.append(model),
}


def run(name: str, compiled: bool) -> tuple[list[Any], Log, nn.Module]:
    torch.manual_seed(1)
    model, log = nn.Linear(4, 1), Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(5, 4), torch.randn(3, 4)]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        APPENDED[name](log, model, x)
        optimizer.step()
        return loss.detach()

    used = graphopt.compile(step) if compiled else step
    found = [(used(batches[call % 2]).item(), len(log.rows), len(log.last)) for call in range(7)]
    return found, log, model


@pytest.mark.parametrize("name", list(APPENDED))
def test_every_call_appends_what_eager_appends(name: str) -> None:
    expected, log, model = run(name, compiled=False)
    found, ours, our_model = run(name, compiled=True)
    assert found == expected
    as_eager = [[model if v is our_model else v for v in part] for part in ours.found()[:2]]
    assert [*as_eager, ours.found()[2]] == log.found()
    assert list(map(type, ours.rows)) == list(map(type, log.rows))


def test_objects_from_outside_keep_their_identity_and_others_are_made_anew() -> None:
    _, log, _ = run("list from outside", compiled=True)
    assert all(row is NAMES for row in log.rows)
    _, log, _ = run("list", compiled=True)
    assert len(set(map(id, log.rows))) == len(log.rows)
