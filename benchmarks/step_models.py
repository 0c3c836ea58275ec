"""Models that the benchmarks train, each of which makes communication hard to hide in its own way,
batches of random data, and steps of several forms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from graphopt.demo.model import CharGPT, GPTSize

GPT_ALPHABET = 100
GPT_LENGTH = 64
EMBEDDED_WORDS = 20_000
WORDS = {"gpt": (GPT_ALPHABET, 8, GPT_LENGTH), "embedding": (EMBEDDED_WORDS, 16, 32)}
"""Of models that read words: how many there are, rows of a batch, and words of a row."""
MAX_NORM = 1.0
PARTS = 4


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """A training step in plain PyTorch for every model: logits against classes."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt(layers: int = 4) -> nn.Module:
    """The demo's GPT: tied embeddings, dropout."""
    return CharGPT(GPTSize(GPT_ALPHABET, length=GPT_LENGTH, layers=layers))


def convnet() -> nn.Module:
    """A CNN of four convolutions with BatchNorm and in-place ReLU."""
    widths = [3, 32, 64, 128, 256]
    stages = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, stride=1 + (before > 3), padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )
        for before, after in pairwise(widths)
    ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


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
        self.embedding = nn.Embedding(EMBEDDED_WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits, of shape (batch, length, alphabet)."""
        return F.linear(self.blocks(self.embedding(tokens)), self.embedding.weight)


def stack(width: int = 256, blocks: int = 8) -> nn.Module:
    """A stack of equal blocks with 17 MB of gradients."""
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": stack,
    "gpt": gpt,
    "convnet": convnet,
    "embedding": TiedEmbedding,
}


def drawn_batch(model: str, generator: torch.Generator, times: int = 1) -> tuple[Tensor, Tensor]:
    """Random inputs and classes for one step, of `times` batches."""
    drawn = [_batch(model, generator) for _ in range(times)]
    inputs, targets = zip(*drawn, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _batch(model: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if model in WORDS:
        words, rows, length = WORDS[model]
        drawn = torch.randint(words, (rows, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    shape, classes = ((1024, 256), 256) if model == "stack" else ((32, 3, 32, 32), 10)
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(classes, shape[:1], generator=generator)


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
