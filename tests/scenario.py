"""One training as a scenario: everything that may happen while a step is in flight."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from twins import SEED, Twins, World, world
from zoo import MODELS

PIPELINES = {
    "default": "default",
    "copies": "remove_copy_from_optimizer",
    "fusion": "comm_fusion_with_concat(bucket_size_mb=0.002)",
    "waits": "comm_fusion_with_concat -> schedule_comm_wait",
    "moves": "remove_copy_from_optimizer -> iter_move_grads_and_optimizers",
    "small buckets": (
        "remove_copy_from_optimizer -> comm_fusion_with_concat(bucket_size_mb=0.002)"
        " -> schedule_comm_wait -> iter_move_grads_and_optimizers(held_back=0.33)"
    ),
}

# DDP broadcasts buffers in other calls than ours under no_sync (docs/exactness.md), and takes
# reentrant checkpoints only without it.
NO_ACCUMULATION = ("convnet", "running-mean", "shared-storage", "checkpointed-reentrant")


def step(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, last: bool = True
) -> Tensor:
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    return loss


class Scenario:
    """One training of both twins on one rank."""

    def __init__(self, rank: int, model: str, optimizer: str, **options: Any) -> None:
        def build() -> World:
            built = world(step, model, optimizer)
            schedule = LambdaLR(built.optimizer, lambda k: 1.0 / (1 + 0.3 * k))
            built.extra["scheduler"] = schedule
            return built

        ddp: dict[str, Any] = {}
        if model == "checkpointed-reentrant":  # DDP takes these only in a graph declared static
            ddp = {"find_unused_parameters": False, "static_graph": True}
        self.twins = Twins(build, ddp=True, ddp_options=ddp, seed=SEED + rank, **options)
        self.rank, self.model, self.count, self.flights = rank, model, 0, 0

    def steps(self, count: int, size: int = 4, last: bool = True) -> None:
        for _ in range(count):
            self.count += 1
            batch = MODELS[self.model].batch(1000 * self.rank + self.count, size)
            self.twins.step_unseen(*batch, last)
            self.flights += self.twins.compiled.graph_module.in_flight
            for twin in (self.twins.eager, self.twins.captured):
                twin.extra["scheduler"].step()

    def checkpoint(self) -> None:
        """Save, train on, and come back."""

        def save(w: World) -> bytes:
            file = io.BytesIO()
            torch.save([w.model.state_dict(), w.optimizer.state_dict()], file)
            return file.getvalue()

        eager, captured = save(self.twins.eager), save(self.twins.captured)
        self.steps(2)
        for saved, w in ((eager, self.twins.eager), (captured, self.twins.captured)):
            model, optimizer = torch.load(io.BytesIO(saved))
            w.model.load_state_dict(model)
            w.optimizer.load_state_dict(optimizer)
        self.twins.compare_state()

    def run(self, *, accumulates: bool = True) -> int:
        """The whole scenario; how many steps ended with work in flight."""
        self.steps(4)
        self.twins.compiled.flush()
        self.twins.compare_state()
        self.steps(2)
        self.checkpoint()
        self.steps(2)
        self.twins.compiled.flush()
        self.steps(2, size=3)  # another shape, with a step in flight
        self.twins.compare_state()
        if accumulates:
            self.steps(1)
            with self.twins.no_sync():
                self.steps(2, last=False)
            self.steps(2)
        self.twins.compiled.flush()
        self.twins.compare_state()
        self.steps(1)
        self.twins.finish()
        return self.flights
