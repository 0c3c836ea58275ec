"""What memory that compiled regions keep saves: steps with it and without, in turn, in one process.

    python benchmarks/kept_memory.py
    python benchmarks/kept_memory.py --models mlp --rows 2048 --steps 5 --rounds 3

Both train the same model from the same values, so that their losses have to be equal to the bit.
Seconds are those that all threads compute; page faults are those that the kernel serves by giving
a page of zeros, as it does where an allocator has given memory back. Of the rounds the median
counts.
"""

from __future__ import annotations

import argparse
import resource
import time
from statistics import median
from typing import NamedTuple

import torch
from compute_models import WORKLOADS, Batch, Workload
from compute_variants import plain_step
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

WIDTH = 512


class Cost(NamedTuple):
    """Of one step."""

    cpu_seconds: float
    page_faults: float


class Pointwise(nn.Module):
    """Layers with much pointwise work, whose activations compiled code makes and drops again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(x + torch.tanh(F.gelu(layer(x))).sin())
        return x


def pointwise(rows: int) -> Workload:
    """That model on batches of so many rows."""

    def batch(generator: torch.Generator) -> Batch:
        return (torch.randn(rows, WIDTH, generator=generator),)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).square().mean()
        return result

    return Workload(f"activations of {rows * WIDTH // 2**18} MiB", Pointwise, batch, loss)


class Side:
    """A model in training, with memory that is kept or without."""

    def __init__(self, workload: Workload, kept: bool) -> None:
        torch.manual_seed(0)
        self._model = workload.build()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        options = graphopt.lowering.Options(static_memory=kept)
        self._step = graphopt.compile(plain_step(workload.loss), lower=options)

    def run(self, batches: list[Batch]) -> tuple[Cost, list[float]]:
        """Train on the batches: what one step costs in the mean, and the losses."""
        torch.manual_seed(len(batches))  # of dropout, the same on both sides
        faults, start = _page_faults(), time.process_time()
        losses = [self._step(self._model, self._optimizer, *batch) for batch in batches]
        self._step.flush()
        spent = time.process_time() - start
        count = len(batches)
        cost = Cost(spent / count, (_page_faults() - faults) / count)
        return cost, [float(loss) for loss in losses]


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def compare(workload: Workload, steps: int, rounds: int) -> tuple[Cost, Cost]:
    """What a step costs with kept memory, and without."""
    generator = torch.Generator().manual_seed(1)
    batches = [workload.batch(generator) for _ in range(steps)]
    sides = Side(workload, kept=True), Side(workload, kept=False)
    for side in sides:
        side.run(batches[:3])
    found: tuple[list[Cost], list[Cost]] = [], []
    for index in range(rounds):
        order = (0, 1) if index % 2 else (1, 0)
        losses = {}
        for which in order:
            cost, losses[which] = sides[which].run(batches)
            found[which].append(cost)
        assert losses[0] == losses[1], "kept memory changes a loss"
    with_it, without = (Cost(*map(median, zip(*costs, strict=True))) for costs in found)
    return with_it, without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,gpt,convnet", help="as in compute.py")
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{'model':22} {'CPU ms a step':>22} {'ratio':>7} {'page faults a step':>22}")
    workloads = {name: WORKLOADS[name] for name in options.models.split(",")}
    workloads |= {work.sizes: work for work in map(pointwise, options.rows)}
    for name, workload in workloads.items():
        kept, not_kept = compare(workload, options.steps, options.rounds)
        ratio = kept.cpu_seconds / not_kept.cpu_seconds
        times = f"{1e3 * kept.cpu_seconds:.1f} / {1e3 * not_kept.cpu_seconds:.1f}"
        faults = f"{kept.page_faults:.0f} / {not_kept.page_faults:.0f}"
        print(f"{name:22} {times:>22} {ratio:>7.3f} {faults:>22}")


if __name__ == "__main__":
    main()
