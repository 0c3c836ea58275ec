"""Dictionaries of classes of the program's outside a step, against eager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of, trained


class Meter:
    """As that of YOLOX."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: Any) -> None:
        self.count += 1
        self.total += value


class Meters(defaultdict[str, Any]):
    def update(self, values: dict[str, Any]) -> None:  # type: ignore[override]
        for key, value in values.items():
            self[key].update(value.detach())


class Missing(dict[str, Any]):
    def __missing__(self, key: str) -> Meter:
        self[key] = Meter()
        return self[key]  # type: ignore[no-any-return]


class Doubling(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value * 2)


class Attributes(dict[str, Any]):
    """Raises another error than `hasattr` knows."""

    def __getattr__(self, key: str) -> Any:
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


def with_meters(table: Any, number: int, loss: Tensor) -> None:
    table.update({"loss": loss, f"loss{number % 2}": loss})


def with_missing(table: Any, number: int, loss: Tensor) -> None:
    table["loss"].update(loss.detach())


def doubling(table: Any, number: int, loss: Tensor) -> None:
    table["loss"] = loss.item()
    table["tensor"] = loss.detach()


def attributes(table: Any, number: int, loss: Tensor) -> None:
    table.sum = table.get("sum", 0) + loss.item()
    table["loss"] = loss.detach()
    print(f"{table.loss.item():.4f}")


def orders(table: Any, number: int, loss: Tensor) -> None:
    table.update(loss=loss.detach(), number=number)
    table.setdefault("first", loss.item())


CASES: list[tuple[Callable[[Any, int, Tensor], None], Callable[[], Any]]] = [
    (with_meters, lambda: Meters(Meter)),
    (with_missing, Missing),
    (doubling, Doubling),
    (attributes, Attributes),
    (orders, Attributes),
]


def _left(table: Any) -> Any:
    meters = {k: [v.total, v.count] for k, v in table.items() if isinstance(v, Meter)}
    return [{**table, **meters}, list(table)]


@pytest.mark.parametrize(("body", "made"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_each_call_leaves_there_what_eager_code_leaves(body: Any, made: Any) -> None:
    def make() -> Loop:
        model, table = nn.Linear(4, 2), made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> None:
            trained(model, optimizer, x)
            body(table, number, model(x).square().mean())

        return Loop(step, lambda: [model, _left(table)])

    assert graphs_of(make, 6) <= 4
