"""Trainings for sharded steps: models whose rows can be cut, and runs beside DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import graphopt
from twins import SEED

VOCABULARY, WIDTH = 67, 64


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """A small language model. Rows of the embedding do not divide evenly among two ranks; with
    `tied`, its weight is the head's as well."""

    def __init__(self, layers: int = 1, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Uneven(nn.Module):
    """Large rows that no two ranks can divide at multiples of 64 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 330)
        self.head = nn.Linear(330, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens).tanh())


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def clipped_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def batches(rank: int, count: int = 3, rows: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (2, rows, 8), generator=generator)
        yield tokens[0], tokens[1]


def whole(tensor: Any) -> Tensor:
    """All of a tensor, on all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(tensor: object) -> bool:
    return hasattr(tensor, "full_tensor")


class Beside:
    """A sharded training and the same under DDP."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[Any], Optimizer],
        step: Callable[..., Any] = train_step,
        stage: int = 1,
        pipeline: str = "none",
        **options: Any,
    ) -> None:
        torch.manual_seed(SEED)
        self.model = build()
        self.reference = copy.deepcopy(self.model)
        self.optimizer = optimizer(self.model.parameters())
        self.reference_optimizer = optimizer(self.reference.parameters())
        self.ddp = DistributedDataParallel(self.reference)
        self.eager = step
        kind = graphopt.ZeRO(stage=stage, **options)
        self.step = graphopt.compile(step, parallel=kind, pipeline=pipeline)

    def renew_ddp(self) -> None:
        """Another DistributedDataParallel, which knows what requires a gradient now."""
        self.ddp = DistributedDataParallel(self.reference)

    def run(self, rank: int, count: int = 3, rows: int = 2) -> None:
        for given in batches(rank, count, rows):
            ours = self.step(self.model, self.optimizer, *given)
            theirs = self.eager(self.ddp, self.reference_optimizer, *given)
            assert torch.equal(ours, theirs), (ours, theirs)
        self.step.flush()

    def compare(self, tolerance: float = 0.0) -> None:
        """All parameters and all state, whole."""
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        for index, (ours, theirs) in enumerate(pairs):
            same(whole(ours.detach()), theirs.detach(), f"parameter {index}", tolerance)
            state = self.optimizer.state.get(ours, {})
            expected = self.reference_optimizer.state.get(theirs, {})
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    same(whole(state[key]), value, f"{key} of parameter {index}", tolerance)
                else:
                    assert state[key] == value


def same(ours: Tensor, theirs: Tensor, where: str, tolerance: float = 0.0) -> None:
    gap = float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, where
    assert gap <= tolerance, f"{where}: differs by {gap}"
