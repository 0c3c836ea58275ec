"""The trainings that the demo compares: one model and step function, run by each variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import graphopt
from graphopt.demo.model import CharGPT, GPTSize

ALPHABET, BATCH = 97, 16
COMPUTE, DEFAULT_DDP, GRAPHOPT = "compute alone", "DDP, 25 MB", "graphopt"
BUCKETS_MB: dict[str, float] = {DEFAULT_DDP: 25, "DDP, 1 MB": 1, "DDP, ½ MB": 0.5}
"""DistributedDataParallel with its default bucket size, and with smaller ones."""
VARIANTS = (COMPUTE, *BUCKETS_MB, GRAPHOPT)


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """The training step in plain PyTorch, the same for all variants."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class RandomState:
    """The random generator state of one replica, so that replicas in a process draw alike."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.save()

    def save(self) -> None:
        """Saves the state of the random generator."""
        self._state = torch.get_rng_state()

    def restore(self) -> None:
        """Restores the saved state of the random generator."""
        torch.set_rng_state(self._state)


@dataclass
class Training:
    """A model that one variant trains.

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

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], float]:
        """Runs one step per batch and flushes; returns the losses and the mean seconds of a step.

        Work that a step leaves to the next belongs to it, so the time ends after the last flush.
        """
        self.random.restore()
        start = perf_counter()
        losses = []
        for inputs, targets in batches:
            losses.append(self.step(self.trained, self.optimizer, inputs, targets))
            self.scheduler.step()
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        seconds = perf_counter() - start
        self.random.save()
        return [loss.item() for loss in losses], seconds / len(batches)


def make_training(variant: str, pipeline: str, seed: int) -> Training:
    """Makes a variant's training, with the same initial bits on every rank, by `seed`."""
    torch.manual_seed(seed)
    model = CharGPT(GPTSize(ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 20 / (20 + step))
    trained: nn.Module = model
    step: Callable[..., Tensor] = train_step
    if variant in BUCKETS_MB:
        # Gradients that are views of the buckets spare DDP a copy and the memory of one.
        trained = DistributedDataParallel(
            model, bucket_cap_mb=BUCKETS_MB[variant], gradient_as_bucket_view=True
        )
    elif variant == GRAPHOPT:
        step = graphopt.compile(train_step, pipeline=pipeline)
    rank_seed = 1 + seed * 1000 + torch.distributed.get_rank()
    random = RandomState(rank_seed)
    return Training(step, model, trained, optimizer, scheduler, random)


class Batches:
    """An endless iterator over this rank's batches, in which each sequence counts up by its own
    stride."""

    def __init__(self, seed: int, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(seed * 1000 + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """The next inputs and next-token targets, both int64 of shape (batch, length)."""
        start, stride = torch.randint(ALPHABET, (2, BATCH, 1), generator=self._generator)
        sequence = (start + stride * torch.arange(GPTSize.length + 1)) % ALPHABET
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
