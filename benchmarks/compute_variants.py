"""The ways to run a training step that `compute.py` compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from compute_models import OPTIMIZERS, Batch, Loss, Workload
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

Step = Callable[..., Tensor]

EAGER = "eager"
COMPILED_MODEL = "torch.compile(model)"
COMPILED_STEP = "torch.compile(step)"
COMPILED_GRADIENTS = "torch.compile(forward + backward)"
INDUCTOR = "graphopt inductor"
INDUCTOR_RANDOM = "graphopt inductor, random"

TORCH_COMPILE = (COMPILED_MODEL, COMPILED_STEP, COMPILED_GRADIENTS)
GRAPHOPT = ("graphopt none", "graphopt default", INDUCTOR)
VARIANTS = (EAGER, *TORCH_COMPILE, *GRAPHOPT)
"""Of every model. `INDUCTOR_RANDOM`, of models with dropout, draws other numbers than eager, as all
of torch.compile does."""


def plain_step(loss_of: Loss) -> Step:
    """Forward, backward and optimizer, as a user writes them."""

    def step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled_gradients_step(loss_of: Loss) -> Step:
    """Forward and backward as one graph of torch.compile's; the optimizer after it."""

    @torch.compile(fullgraph=True)
    def gradients(model: nn.Module, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        return loss.detach()

    def step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
        loss: Tensor = gradients(model, *batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def variant_step(variant: str, loss_of: Loss) -> Step:
    """The step of a variant."""
    if variant == COMPILED_GRADIENTS:
        return compiled_gradients_step(loss_of)
    step = plain_step(loss_of)
    if variant == COMPILED_STEP:
        return torch.compile(step)
    if variant == INDUCTOR:
        return graphopt.compile(step, lower="inductor")
    if variant == INDUCTOR_RANDOM:
        return graphopt.compile(step, lower=graphopt.lowering.Options(random=True))
    if variant in GRAPHOPT:
        return graphopt.compile(step, pipeline=variant.split()[1])
    return step


def settings_while_compiling(variant: str) -> AbstractContextManager[object]:
    """What a variant needs to be set while it compiles."""
    if variant == COMPILED_GRADIENTS:
        return torch._dynamo.config.patch(trace_autograd_ops=True)
    return nullcontext()


class Training:
    """A model in training with AdamW, in one of the variants."""

    def __init__(self, workload: Workload, variant: str, optimizer: str = "fused") -> None:
        torch.manual_seed(0)
        self.variant = variant
        self.model = workload.build()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, **OPTIMIZERS[optimizer]
        )
        self.trained = torch.compile(self.model) if variant == COMPILED_MODEL else self.model
        self.step = variant_step(variant, workload.loss)

    def warm_up(self, batches: Sequence[Batch]) -> float:
        """The first steps, in which everything is compiled; seconds they take together."""
        with settings_while_compiling(self.variant):
            return self.seconds(batches) * len(batches)

    def seconds(self, batches: Sequence[Batch]) -> float:
        """Of one step, the mean of several one after another, until nothing is in flight."""
        start = time.perf_counter()
        for batch in batches:
            self.step(self.trained, self.optimizer, *batch)
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        return (time.perf_counter() - start) / len(batches)
