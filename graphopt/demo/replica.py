"""The training that the demo compares: one model, its optimizer, and who runs the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import graphopt
from graphopt.demo.model import CharGPT, GPTSize

Variant = Literal["eager", "graphopt"]
VARIANTS: tuple[Variant, Variant] = ("eager", "graphopt")


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Plain PyTorch, the same function for both variants."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class RandomState:
    """The random numbers of one replica, so that two replicas in a process draw the same ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        torch.manual_seed(seed)
        self.save()

    def save(self) -> None:
        """Remember where the generators stand."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._on_cuda else None

    def restore(self) -> None:
        """Put the generators where they stood."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"


@dataclass
class TrainedModel:
    """A model in training.

    Attributes:
        step: the step function as it is run: plain, or captured.
        model: the bare model.
        trained: what `step` is given: the model wrapped in DDP, or the model itself.
    """

    step: Callable[..., Tensor]
    model: CharGPT
    trained: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    random: RandomState
    device: torch.device

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], float]:
        """Steps one after another, until nothing is in flight: their losses, and the mean seconds.

        Work that a step leaves to the next belongs to it, so the time ends after the last flush.
        """
        self.random.restore()
        _synchronize(self.device)
        start = perf_counter()
        losses = []
        for inputs, targets in batches:
            losses.append(self.step(self.trained, self.optimizer, inputs, targets))
            self.scheduler.step()
        self.flush()
        _synchronize(self.device)
        seconds = perf_counter() - start
        self.random.save()
        return [loss.item() for loss in losses], seconds / len(batches)

    def flush(self) -> None:
        """Finish what a captured step still has in flight."""
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()


def make_replica(
    variant: Variant, alphabet: int, steps: int, pipeline: str, seed: int, device: torch.device
) -> TrainedModel:
    """The same bits on every rank and for both variants; `seed` gives the weights."""
    torch.manual_seed(seed)
    model = CharGPT(GPTSize(alphabet)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(optimizer, lambda step: _part_of_rate(step, steps))
    trained: nn.Module = model
    step: Callable[..., Tensor] = train_step
    if variant == "eager":
        trained = _distributed(model)
    else:
        step = graphopt.compile(train_step, pipeline=pipeline)
    rank_seed = 1 + seed * 1000 + torch.distributed.get_rank()
    random = RandomState(rank_seed, device)
    return TrainedModel(step, model, trained, optimizer, schedule, random, device)


def _part_of_rate(step: int, steps: int) -> float:
    """Up linearly for a fifth of the steps, then down a cosine: another rate in every step."""
    rise = max(1, steps // 5)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


def _distributed(model: CharGPT) -> DistributedDataParallel:
    # Gradients that are views of the buckets spare DDP a copy and the memory of one.
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
