"""Dictionaries that are their own attributes, as many programs keep their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class AttrDict(dict[str, Any]):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__ = self


class Trained:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.h = AttrDict(scale=2.0, steps=0, log=[], inner=AttrDict(power=2))
        self.model = nn.Linear(6, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def update(self, h: Any, x: Tensor) -> Tensor:
        loss = self.model(x).abs().pow(h.inner.power).mean() * h["scale"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def read(self, x: Tensor) -> Tensor:
        return self.update(self.h, x)

    def counted(self, x: Tensor) -> Tensor:
        self.h.steps += 1
        return self.update(self.h, x) * self.h.steps

    def kept(self, x: Tensor) -> None:
        loss = self.update(self.h, x)
        self.h.log.append(loss.item())
        self.h["last"] = loss.item()
        self.h.best = min(self.h.get("best", 100.0), loss.item())


def rows(step: Callable[[Trained, Tensor], Any], captured: bool) -> list[Any]:
    trained = Trained()
    call: Callable[..., Any] = graphopt.compile(step) if captured else step
    given = [call(trained, torch.randn(4, 6)) for _ in range(5)]
    found = [None if each is None else each.item() for each in given]
    return [found, repr(trained.h), trained.model.weight.tolist()]


@pytest.mark.parametrize("step", [Trained.read, Trained.counted, Trained.kept])
def test_as_eager(step: Callable[[Trained, Tensor], Any]) -> None:
    assert rows(step, True) == rows(step, False)
