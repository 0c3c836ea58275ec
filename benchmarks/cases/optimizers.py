"""Cases of optimizers: torch's, transformers', and published ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from .case import STEPS, Case, case, repeated, trains
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


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def train(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def trained_with(name: str, make: Callable[..., Any], **options: Any) -> None:
    """Registers a small training with an optimizer; the learning rate changes in every call, and
    the loop covers every branch."""

    def build() -> Case:
        net = model()
        optimizer = make(net.parameters(), **options)

        def after(index: int, loss: Any) -> None:
            for group in optimizer.param_groups:
                if group.get("lr") is not None:
                    group["lr"] = group["lr"] * 0.97

        calls = repeated(net, optimizer, draw=batch, steps=STEPS + 3)
        return Case(train, calls, [net, optimizer], after)

    build.__name__ = name
    case(build)


def adafactor(parameters: Any, **options: Any) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **options)


def lookahead(parameters: Any) -> Lookahead:
    return Lookahead(Adam(parameters, lr=1e-2), k=2)


trained_with("adam", Adam)
trained_with("adamw_amsgrad", AdamW, amsgrad=True, foreach=True)
trained_with("adam_fused", Adam, fused=True)
trained_with("sgd_nesterov", SGD, lr=0.1, momentum=0.9, nesterov=True)
trained_with("radam", torch.optim.RAdam, lr=1e-2)
trained_with("radam_foreach", torch.optim.RAdam, lr=1e-2, foreach=True)
trained_with("nadam", torch.optim.NAdam, lr=1e-2)
trained_with("asgd", torch.optim.ASGD, lr=1e-2)
trained_with("asgd_foreach", torch.optim.ASGD, lr=1e-2, foreach=True)
trained_with("rprop", torch.optim.Rprop)
trained_with("adagrad", torch.optim.Adagrad, lr_decay=0.01)
trained_with("adadelta", torch.optim.Adadelta)
trained_with("adamax", torch.optim.Adamax)
trained_with("rmsprop_centered", torch.optim.RMSprop, centered=True, momentum=0.5)
trained_with("adafactor", torch.optim.Adafactor)


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


trains(matrices, torch.optim.Muon, batch, name="muon", lr=1e-2)(train)


@trains(model, torch.optim.LBFGS, batch, max_iter=2)
def lbfgs(net: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (5, 4)), torch.randint(0, 3, (5,))


sparse = partial(nn.EmbeddingBag, 20, 3, sparse=True)
trains(sparse, torch.optim.SparseAdam, words, name="sparse_adam")(train)

trained_with(
    "adafactor_of_transformers", adafactor, lr=1e-3, relative_step=False, scale_parameter=False
)
trained_with(
    "adafactor_of_transformers_relative", adafactor,
    scale_parameter=True, relative_step=True, warmup_init=True,
)  # fmt: skip
trained_with("lion", Lion, lr=1e-3, weight_decay=0.1)
trained_with("lamb", LAMB)
trained_with("adan", Adan, lr=1e-3, weight_decay=0.02)
trained_with("madgrad", MADGRAD, lr=1e-2, weight_decay=1e-4)
trained_with("laprop", LaProp, lr=1e-3)
trained_with("adam_with_python_count", NumberedAdam, lr=1e-3)
trained_with("lookahead", lookahead)
trained_with("schedule_free", ScheduleFree)
trained_with("prodigy", Prodigy)
