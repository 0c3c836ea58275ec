"""Large containers, large arrays and deep nests outside a step: what it reads of them is looked at
in each call, or refused."""

from __future__ import annotations

import array
import copy
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

MANY = 3000


def raise_item(held: Any) -> None:
    held[5] += 1


def raise_deep(held: Any) -> None:
    held["a"]["b"]["c"]["d"]["e"] += 1


def deep() -> Any:
    return {"a": {"b": {"c": {"d": {"e": 1.0}}}}}


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "list": (lambda: [1.0] * MANY, lambda held: sorted(held)[-1], raise_item),
    "list in turn": (lambda: [1.0] * MANY, lambda held: max(each for each in held), raise_item),
    "list as a tensor": (lambda: [1.0] * MANY, lambda held: torch.tensor(held).max(), raise_item),
    "slice": (lambda: [1.0] * MANY, lambda held: max(held[:50]), raise_item),
    "has": (lambda: [1.0] * MANY, lambda held: 3.0 if 2.0 in held else 1.0, raise_item),
    "dictionary": (
        lambda: dict.fromkeys(range(MANY), 1.0),
        lambda held: max(held.values()),
        raise_item,
    ),
    "set": (lambda: set(range(MANY)), max, lambda held: held.add(2 * MANY)),
    "queue": (lambda: deque([1.0] * MANY), lambda held: held[5], raise_item),
    "array": (lambda: np.ones(100_000), lambda held: float(held.max()), raise_item),
    "item of an array": (lambda: np.ones(100_000), lambda held: float(held[5]), raise_item),
    "bytes": (lambda: bytearray(100_000), lambda held: 1.0 + max(held), raise_item),
    "numbers": (lambda: array.array("d", [1.0] * 100_000), max, raise_item),
    "deep copy": (deep, lambda held: copy.deepcopy(held)["a"]["b"]["c"]["d"]["e"], raise_deep),
    "deep text": (
        deep,
        lambda held: float(json.dumps(held).rpartition(":")[2].strip(" }")),
        raise_deep,
    ),
    "deep list": (
        lambda: [[[[[1.0]]]]],
        lambda held: torch.tensor(held).max(),
        lambda held: raise_deep({"a": {"b": {"c": {"d": _Last(held)}}}}),
    ),
}


class _Last:
    """The innermost number of a nest of lists, by a name."""

    def __init__(self, held: Any) -> None:
        self._list = held[0][0][0][0]

    def __getitem__(self, key: str) -> Any:
        return self._list[0]

    def __setitem__(self, key: str, value: Any) -> None:
        self._list[0] = value


def losses_of(held: Any, read: Callable[[Any], Any], change: Any, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x * read(held)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    used: Any = graphopt.compile(step) if compiled else step
    losses = []
    for _ in range(3):
        losses.append(used(torch.ones(3, 4)).item())
        change(held)
    return losses


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    make, read, change = CASES[name]
    assert losses_of(make(), read, change, True) == losses_of(make(), read, change, False)


LARGER: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.ones(3 << 20), lambda held: float(held.max())),
    "list": (lambda: [1.0] * 200_000, lambda held: max(each for each in held)),
}


@pytest.mark.parametrize("name", LARGER)
def test_what_costs_too_much_to_look_at_is_refused(name: str) -> None:
    make, read = LARGER[name]
    with pytest.raises(CaptureError, match="it reads all of held"):
        losses_of(make(), read, lambda held: None, True)


def test_the_hint_works() -> None:
    held = np.ones(3 << 20)
    held.flags.writeable = False
    losses = [losses_of(held, lambda a: float(a.max()), lambda a: None, on) for on in (True, False)]
    assert losses[0] == losses[1]
