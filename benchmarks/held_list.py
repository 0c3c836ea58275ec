"""Steps of a program that holds `list(model.parameters())`, and of one that does not, in turns.

    python benchmarks/held_list.py
    python benchmarks/held_list.py --link 200mbit

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ranks
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from step_models import MODELS, batch, train_step
from step_time import Training
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo.launch import Reporter

FREE, HELD, FLUSHED = "nothing held", "list held", "flushed"


class Variant(Training):
    """One program; `FLUSHED` leaves nothing in flight, so that nothing overlaps."""

    def __init__(self, name: str, model: str, pause: float) -> None:
        super().__init__("eager", model, "adamw")
        self.pause = pause
        self.trained = self.model
        self.step = graphopt.compile(train_step)
        self.flushes = name == FLUSHED
        self.held: list[Any] = list(self.model.parameters()) if name == HELD else []

    def seconds(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Of one step, the mean of several one after another, until nothing is in flight."""
        step: Any = self.step
        self.random.restore()
        start = time.perf_counter()
        for inputs, targets in batches:
            step(self.trained, self.optimizer, inputs, targets)
            assert sum(p.numel() for p in self.held) >= 0
            if self.flushes:
                step.flush()
            time.sleep(self.pause)
        step.flush()
        seconds = time.perf_counter() - start
        self.random.save()
        return seconds / len(batches)


@record
def work(task: Figures, folder: Path) -> None:
    """Train all variants in turns, on the same batches."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        names = [FREE, HELD, FLUSHED]
        variants = {name: Variant(name, task["model"], task["pause"]) for name in names}
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds = ranks.in_turns(
            names,
            lambda name, batches: variants[name].seconds(batches),
            lambda: batch(task["model"], generator),
            task["rounds"],
        )
        reporter.send("seconds", seconds=seconds)


def main() -> None:
    """Measure and print a table."""
    parser = ranks.training_parser(__doc__, MODELS)
    parser.add_argument("--pause", type=float, default=0.0, help="between two steps, in ms")
    options = parser.parse_args()
    if ranks.works(options, work):
        return
    steady = ranks.run_trainings(__file__, options, pause=options.pause / 1e3)
    table = Table(title=f"{options.model}, {options.ranks} ranks, {options.link or 'loopback'}")
    for heading in ("program", "step (median)", f"/ {FREE}, paired"):
        table.add_column(heading)
    ratios = {}
    for name, seconds in steady.items():
        ratios[name] = spread(ranks.paired(seconds, steady[FREE]))
        shown = show_spread(ratios[name], len(seconds))
        table.add_row(name, f"{1e3 * median(seconds):.1f} ms", shown)
    Console().print(table)
    middle = {name: median(seconds) for name, seconds in steady.items()}
    gained = middle[FLUSHED] - middle[FREE]
    kept = (middle[FLUSHED] - middle[HELD]) / gained if gained > 0 else float("nan")
    print(f"overlap kept: {kept:.3f} of {1e3 * gained:.1f} ms")
    if options.json:
        figures = {"torch": torch.__version__, "seconds": steady, "ratios": ratios}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
