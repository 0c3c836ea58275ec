"""What it saves that the process keeps memory of the CPU which a captured step has freed.

    python benchmarks/host_memory.py
    python benchmarks/host_memory.py --models convnet --rounds 3

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import mean, median

import torch
from overlap_models import OVERLAP_MODELS, overlap_batch
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from step_models import train_step
from usage import Usage

import graphopt

EAGER, GIVEN_BACK, KEPT = "eager", "graphopt, memory given back", "graphopt"
AS_GLIBC_DOES = {"GLIBC_TUNABLES": "glibc.malloc.arena_test=8"}
"""What is glibc's own value; that something is said of its allocator leaves it as it is."""

WARM_UP_STEPS = 5


def measured(model_name: str, compiled: bool, steps: int) -> Figures:
    """Of one training in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = OVERLAP_MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = overlap_batch(model_name, torch.Generator().manual_seed(0))
    step = graphopt.compile(train_step) if compiled else train_step
    for _ in range(WARM_UP_STEPS):
        step(model, optimizer, *batch)

    def seconds() -> float:
        begin = time.perf_counter()
        step(model, optimizer, *batch)
        return time.perf_counter() - begin

    usage = Usage()
    taken = median(usage.of(model_name, 1, seconds) for _ in range(steps))
    return {
        "ms": 1e3 * taken,
        "pages": mean(run["fresh_pages"] for run in usage.found[model_name]),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def in_own_process(model_name: str, variant: str, steps: int) -> Figures:
    """As `measured`, in a process of its own."""
    environment = dict(os.environ) | (AS_GLIBC_DOES if variant == GIVEN_BACK else {})
    asked = json.dumps([model_name, variant != EAGER, steps])
    command = [sys.executable, __file__, "--measure", asked]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(found.stdout.splitlines()[-1])
    return figures


def table(model_name: str, runs: dict[str, list[Figures]]) -> Table:
    """Medians, and ratios of each round."""
    made = Table(title=f"{model_name}: processes in turn")
    for head in ("variant", "ms per step", "/ eager", "fresh pages", "peak MB"):
        made.add_column(head)
    for variant, found in runs.items():
        ratio = spread([a["ms"] / b["ms"] for a, b in zip(found, runs[EAGER], strict=True)])
        of = {kind: median(run[kind] for run in found) for kind in found[0]}
        shown = show_spread(ratio, len(found))
        made.add_row(
            variant, f"{of['ms']:.1f}", shown, f"{of['pages']:.0f}", f"{of['peak_mb']:.0f}"
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["stack", "convnet"], choices=OVERLAP_MODELS)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each, at least 2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(*json.loads(options.measure))))
        return
    for model_name in options.models:
        runs: dict[str, list[Figures]] = {EAGER: [], GIVEN_BACK: [], KEPT: []}
        for _ in range(options.rounds):
            for variant, found in runs.items():
                found.append(in_own_process(model_name, variant, options.steps))
        Console().print(table(model_name, runs))


if __name__ == "__main__":
    main()
