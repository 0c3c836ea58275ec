"""Models for pipelines: with marks for any number of stages, arguments, and reference gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphopt.pipelining import MultiUseParameterConfig, pipe_split

ROWS = 3
"""Of a microbatch."""

MICROBATCHES = 4

WIDTH = 8


class Marked(nn.Module):
    """A stack of blocks with a mark between any two."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            if index:
                pipe_split()
            x = block(x)
        return x


class Skips(Marked):
    """What enters, and what the first block makes of it, is read by all later blocks."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        first = y = self.blocks[0](x)
        for block in self.blocks[1:]:
            pipe_split()
            y = block(y) + first * 0.5 - x
            if scale is not None:
                y = y * scale
        return y


class Tied(Marked):
    """The embedding is the head: one parameter in the first and the last stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.embedding = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(self.embedding(x))
        return self.head(y)


class Shared(Marked):
    """One layer that the second and the last stage use, which the first does not know."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index:
                pipe_split()
            x = block(x)
            if index in (1, len(self.blocks) - 1):
                x = self.shared(x)
        return x


class Views(Marked):
    """What crosses boundaries is transposed, expanded, of integers, and without gradient."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        order = x[0].argsort()
        for index, block in enumerate(self.blocks):
            y = block(x).T
            wide = y.mean(1, keepdim=True).expand(-1, y.shape[1])
            if index < len(self.blocks) - 1:
                pipe_split()
            x = (y[order] + wide).T
        return x


class Normed(Marked):
    """Statistics are buffers that forward updates; a mask of booleans is read everywhere."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index:
                pipe_split()
            x = block(x).masked_fill(mask, 0.0)
        return x.T


class WithLoss(Marked):
    """A model that computes its loss and returns more than that."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"logits": y, "loss": F.cross_entropy(y, labels), "parity": labels % 2}


@dataclass(frozen=True)
class Case:
    """A model with `model(stages)` and the data of a batch of `count` microbatches."""

    model: Callable[[int], nn.Module]
    batch_of: Callable[[int], tuple[tuple[Any, ...], dict[str, Any], Tensor]]
    sharing: MultiUseParameterConfig | None = None

    def batch(self, microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        torch.manual_seed(1)
        return self.batch_of(ROWS * microbatches)

    def microbatch(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs, _ = self.batch(index + 1)
        rows = slice(ROWS * index, ROWS * (index + 1))
        return tuple(a[rows] for a in args), {k: v[rows] for k, v in kwargs.items()}

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output.flatten()[: target.numel()], target.flatten().float())


def _floats(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH)


CASES = {
    "mlp": Case(Marked, lambda rows: ((_floats(rows),), {}, _floats(rows))),
    "skips": Case(
        Skips, lambda rows: ((_floats(rows),), {"scale": torch.rand(rows, 1)}, _floats(rows))
    ),
    "tied replicated": Case(
        Tied, lambda rows: ((torch.randint(11, (rows,)),), {}, torch.randn(rows, 11))
    ),
    "tied transmitted": Case(
        Tied,
        lambda rows: ((torch.randint(11, (rows,)),), {}, torch.randn(rows, 11)),
        MultiUseParameterConfig.TRANSMIT,
    ),
    "shared later, transmitted": Case(
        Shared, lambda rows: ((_floats(rows),), {}, _floats(rows)), MultiUseParameterConfig.TRANSMIT
    ),
    "views": Case(Views, lambda rows: ((_floats(rows),), {}, _floats(rows))),
    "buffers": Case(
        Normed,
        lambda rows: ((_floats(rows),), {"mask": torch.rand(rows, WIDTH) < 0.2}, _floats(rows)),
    ),
    "loss inside": Case(
        WithLoss,
        lambda rows: (
            (_floats(rows),),
            {"labels": torch.randint(WIDTH, (rows,))},
            torch.zeros(rows),
        ),
    ),
}


def reference_gradients(case: Case, stages: int, microbatches: int) -> dict[str, Tensor]:
    """Gradients of the whole model in one process: the mean over the microbatches."""
    torch.manual_seed(0)
    model = case.model(stages)
    args, kwargs, target = case.batch(microbatches)
    for index in range(microbatches):
        rows = slice(ROWS * index, ROWS * (index + 1))
        output = model(*(a[rows] for a in args), **{k: v[rows] for k, v in kwargs.items()})
        loss = output["loss"] if isinstance(output, dict) else case.loss(output, target[rows])
        loss.backward()
    return {
        name: parameter.grad / microbatches
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
