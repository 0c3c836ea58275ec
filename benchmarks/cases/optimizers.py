"""Cases of optimizers: torch's, transformers', and published ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import STEPS, Case, case
from .published_optimizers import (
    LAMB,
    MADGRAD,
    Adan,
    LaProp,
    Lion,
    Lookahead,
    NumberedAdam,
    Prodigy,
    ScheduleFree,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def train(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def trained_with(make: Callable[[Any], Any], steps: int = STEPS + 3) -> Case:
    """A small training with an optimizer; the learning rate changes in every call, and the loop
    covers every branch."""
    net = model()
    optimizer = make(net.parameters())
    calls = [(net, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(steps)]

    def after(index: int, loss: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                group["lr"] = group["lr"] * 0.97

    return Case(train, calls, [net, optimizer], after)


def _torch(name: str, label: str = "", **options: Any) -> None:
    def build() -> Case:
        return trained_with(functools.partial(getattr(torch.optim, name), **options))

    build.__name__ = (name.lower() + label).rstrip("_")
    case(build)


_torch("Adam")
_torch("AdamW", "_amsgrad", amsgrad=True, foreach=True)
_torch("Adam", "_fused", fused=True)
_torch("SGD", "_nesterov", lr=0.1, momentum=0.9, nesterov=True)
_torch("RAdam", lr=1e-2)
_torch("RAdam", "_foreach", lr=1e-2, foreach=True)
_torch("NAdam", lr=1e-2)
_torch("ASGD", lr=1e-2)
_torch("ASGD", "_foreach", lr=1e-2, foreach=True)
_torch("Rprop")
_torch("Adagrad", lr_decay=0.01)
_torch("Adadelta")
_torch("Adamax")
_torch("RMSprop", "_centered", centered=True, momentum=0.5)
_torch("Adafactor")


@case
def muon() -> Case:
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    optimizer = torch.optim.Muon(net.parameters(), lr=1e-2)
    calls = [(net, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(STEPS)]
    return Case(train, calls, [net, optimizer])


@case
def lbfgs() -> Case:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def step(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    calls = [(net, optimizer, torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(2)]
    return Case(step, calls, [net, optimizer])


@case
def sparse_adam() -> Case:
    net = nn.Sequential(nn.EmbeddingBag(20, 3, sparse=True))
    optimizer = torch.optim.SparseAdam(net.parameters())
    calls = [
        (net, optimizer, torch.randint(0, 20, (5, 4)), torch.randint(0, 3, (5,)))
        for _ in range(STEPS)
    ]
    return Case(train, calls, [net, optimizer])


@case
def adafactor_of_transformers() -> Case:
    from transformers.optimization import Adafactor

    return trained_with(
        functools.partial(Adafactor, lr=1e-3, relative_step=False, scale_parameter=False)
    )


@case
def adafactor_of_transformers_relative() -> Case:
    from transformers.optimization import Adafactor

    return trained_with(
        functools.partial(Adafactor, scale_parameter=True, relative_step=True, warmup_init=True)
    )


@case
def lion() -> Case:
    return trained_with(functools.partial(Lion, lr=1e-3, weight_decay=0.1))


@case
def lamb() -> Case:
    return trained_with(LAMB)


@case
def adan() -> Case:
    return trained_with(functools.partial(Adan, lr=1e-3, weight_decay=0.02))


@case
def madgrad() -> Case:
    return trained_with(functools.partial(MADGRAD, lr=1e-2, weight_decay=1e-4))


@case
def laprop() -> Case:
    return trained_with(functools.partial(LaProp, lr=1e-3))


@case
def adam_with_python_count() -> Case:
    return trained_with(functools.partial(NumberedAdam, lr=1e-3))


@case
def lookahead() -> Case:
    return trained_with(lambda p: Lookahead(torch.optim.Adam(p, lr=1e-2), k=2))


@case
def schedule_free() -> Case:
    return trained_with(ScheduleFree)


@case
def prodigy() -> Case:
    return trained_with(Prodigy)
