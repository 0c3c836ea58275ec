"""Models that the benchmarks train, batches of random data, and one step for all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from graphopt.demo.model import CharGPT, GPTSize

GPT_ALPHABET = 100
GPT_LENGTH = 64


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """A training step in plain PyTorch for every model: logits against classes."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def mlp() -> nn.Module:
    """An MLP of 8 layers of width 512, 2.1 million parameters."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


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


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "gpt": gpt, "convnet": convnet}


def batch(model: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random inputs and classes for one step."""
    if model == "gpt":
        numbers = torch.randint(GPT_ALPHABET, (8, GPT_LENGTH + 1), generator=generator)
        return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
    shape = (256, 512) if model == "mlp" else (32, 3, 32, 32)
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(10, shape[:1], generator=generator)
