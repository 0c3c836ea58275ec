"""Models of `overlap.py`, each of which makes communication hard to hide in its own way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from step_models import MODELS, batch, train_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

MAX_NORM = 1.0
ROWS = {"stack": 1024, "embedding": 16}
ALPHABET = 20_000
LENGTH = 32
PARTS = 4


class Block(nn.Module):
    """Two layers around a GELU with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Applies the block to `x` of shape (…, width)."""
        return x + self.layers(x)


class TiedEmbedding(nn.Module):
    """A language model dominated by one tied embedding, read first and complete last."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits, of shape (batch, length, alphabet)."""
        return F.linear(self.blocks(self.embedding(tokens)), self.embedding.weight)


def stack(width: int = 256, blocks: int = 8) -> nn.Module:
    """A stack of equal blocks with 17 MB of gradients."""
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


OVERLAP_MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": stack,
    "gpt": MODELS["gpt"],
    "convnet": MODELS["convnet"],
    "embedding": TiedEmbedding,
}


def overlap_batch(model: str, generator: torch.Generator, times: int = 1) -> tuple[Tensor, Tensor]:
    """Random inputs and classes for one step, of `times` batches."""
    drawn = [_batch(model, generator) for _ in range(times)]
    inputs, targets = zip(*drawn, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _batch(model: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if model == "stack":
        shape = (ROWS[model], 256)
        classes = torch.randint(256, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), classes
    if model == "embedding":
        shape = (ROWS[model], LENGTH + 1)
        tokens = torch.randint(ALPHABET, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return batch(model, generator)


def clipped_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """A step with clipping, as for language models: no update before all gradients are known."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulating_step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor
) -> Tensor:
    """A step that accumulates gradients over four parts of a batch, and averages them once."""
    parts = zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)
    total = torch.zeros((), device=inputs.device)
    for number, (some, classes) in enumerate(parts):
        local = isinstance(model, DistributedDataParallel) and number < PARTS - 1
        with model.no_sync() if local else nullcontext():
            loss = F.cross_entropy(model(some).flatten(0, -2), classes.flatten()) / PARTS
            loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def averaged_step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, average: AveragedModel
) -> Tensor:
    """A `clipped_step` followed by a moving average of all weights."""
    loss = clipped_step(model, optimizer, inputs, targets)
    average.update_parameters(model.module if isinstance(model, DistributedDataParallel) else model)
    return loss


def average_of(model: nn.Module) -> AveragedModel:
    """An exponential moving average of a model's weights."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))


class Form(NamedTuple):
    """A way to train a model: its step function and options.

    Attributes:
        step: one update.
        scheduled: the learning rate changes after each step.
        read: the program looks at each loss.
        local: some backwards average nothing, which DDP's `static_graph` does not allow.
        averaged: the step takes an average of the weights as well.
    """

    step: Callable[..., Tensor]
    scheduled: bool = False
    read: bool = False
    local: bool = False
    averaged: bool = False


FORMS = {
    "plain": Form(train_step),
    "clip": Form(clipped_step),
    "people": Form(clipped_step, scheduled=True, read=True),
    "averaged": Form(averaged_step, scheduled=True, averaged=True),
    "accumulate": Form(accumulating_step, local=True),
}
"""*people*: as people train, clipped, with a schedule of learning rates and the loss read."""
