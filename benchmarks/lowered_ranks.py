"""Lowered steps on several ranks: DDP, graphopt, and graphopt with compiled regions, in turns.

    python benchmarks/lowered_ranks.py
    python benchmarks/lowered_ranks.py --link 200mbit

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import ranks
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from step_models import MODELS, batch, train_step
from step_time import Training
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo.launch import Reporter

VARIANTS = {
    "eager DDP": None,
    "graphopt": {"pipeline": "default"},
    "graphopt, lowered": {"pipeline": "default", "lower": "inductor"},
}


@record
def work(task: Figures, folder: Path) -> None:
    """Train all variants in turns, on the same batches."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        trainings = {}
        for name, options in VARIANTS.items():
            trainings[name] = Training("eager", task["model"], "adamw")
            if options is not None:
                trainings[name].trained = trainings[name].model
                trainings[name].step = graphopt.compile(train_step, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds = ranks.in_turns(
            list(VARIANTS),
            lambda name, batches: trainings[name].seconds(batches),
            lambda: batch(task["model"], generator),
            task["rounds"],
        )
        reporter.send("seconds", seconds=seconds)


def main() -> None:
    """Measure and print a table."""
    options = ranks.training_parser(__doc__, MODELS).parse_args()
    if ranks.works(options, work):
        return
    steady = ranks.run_trainings(__file__, options)
    table = Table(title=f"{options.model}, {options.ranks} ranks, {options.link or 'loopback'}")
    for heading in ("variant", "step (median)", "/ eager DDP, paired", "/ graphopt, paired"):
        table.add_column(heading)
    ratios = {}
    for name, seconds in steady.items():
        ratios[name] = {
            other: spread(ranks.paired(seconds, steady[other]))
            for other in ("eager DDP", "graphopt")
        }
        shown = [show_spread(found, len(seconds)) for found in ratios[name].values()]
        table.add_row(name, f"{1e3 * median(seconds):.1f} ms", *shown)
    Console().print(table)
    if options.json:
        figures = {"torch": torch.__version__, "seconds": steady, "ratios": ratios}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
