"""What a step reads outside that is made anew for every call, and containers that it trims itself.

Of what is made anew, one function makes an object for a factor and the number of the call, another
reads the factor from it, but not the number.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

Make = Callable[[float, int], Any]
ANEW: dict[str, tuple[Make, Callable[[Any], Any]]] = {}


@dataclasses.dataclass
class Config:
    beta: float
    number: int = 0

    def get(self) -> float:
        return self.beta


class SubConfig(Config):
    """What it has is where it is in the class above."""


class Scaled(torch.nn.Module):
    """A loss function of a program."""

    def __init__(self, inner: Any, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.inner(x) * self.factor
        return scaled


class Pair(NamedTuple):
    beta: float
    more: dict[str, Any]


def _closure(beta: float) -> Callable[[], float]:
    return lambda: beta


def _default(beta: float) -> Callable[..., float]:
    return lambda scale=beta, *, one=1.0: scale * one


def _sum_of(configs: list[Config]) -> float:
    return sum(config.beta for config in configs)


def _first(configs: dict[str, Config]) -> float:
    return next(config.beta for name, config in configs.items() if name == "a")


def _nested(beta: float, number: int) -> Any:
    inner = types.SimpleNamespace(beta=beta, options={"weights": [1.0, number]})
    return {"loss": inner, "number": number}


ANEW["dictionary"] = lambda b, n: {"beta": b, "n": n}, lambda given: given["beta"]
ANEW["data class"] = Config, lambda given: given.beta
ANEW["list"] = lambda b, n: [b, 0.25], sum
ANEW["nested"] = (_nested, lambda given: given["loss"].beta * given["loss"].options["weights"][0])
ANEW["bound method"] = lambda b, n: Config(b, n).get, lambda given: given()
ANEW["lambda with defaults"] = lambda b, n: _default(b), lambda given: given()
ANEW["closure"] = lambda b, n: _closure(b), lambda given: given()
ANEW["partial"] = lambda b, n: functools.partial(Config.get, Config(b, n)), lambda given: given()
ANEW["objects in a list"] = lambda b, n: [Config(b, n), Config(0.25, n)], _sum_of
ANEW["objects in a dictionary"] = lambda b, n: {"a": Config(b), "b": Config(n)}, _first
ANEW["named tuple"] = (
    lambda b, n: Pair(b, {"x": 1.0, "n": n}),
    lambda given: given.beta * given.more["x"],
)
ANEW["set"] = lambda b, n: {b, 2.0}, lambda given: 1.0 if 0.5 in given else 2.0
ANEW["array"] = lambda b, n: numpy.array([b, 1.0]), lambda given: float(given[0])
ANEW["loss function"] = (
    lambda b, n: torch.nn.CrossEntropyLoss(label_smoothing=b),
    lambda given: given(torch.ones(2, 3), torch.tensor([0, 1])) + given.label_smoothing,
)
ANEW["loss function in another"] = (
    lambda b, n: Scaled(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ELU(b)), 1),
    lambda given: given(torch.tensor(-1.0)),
)
ANEW["function of a loss"] = lambda b, n: Scaled(abs, b), lambda given: given(torch.tensor(-1.0))
ANEW["subclass"] = SubConfig, lambda given: given.beta
ANEW["list for torch"] = lambda b, n: [b, 1.0], lambda given: torch.tensor(given).sum()
ANEW["keywords"] = lambda b, n: {"beta": b}, lambda given: Config(**given).get()
