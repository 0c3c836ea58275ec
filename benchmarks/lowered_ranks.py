"""Lowered steps on several ranks: DDP, graphopt, and graphopt with compiled regions, in turns.

    python benchmarks/lowered_ranks.py
    python benchmarks/lowered_ranks.py --link 200mbit

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from step_models import MODELS, batch, train_step
from step_time import ROUND, WARM_UP_STEPS, Training, process_group
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo import DemoError
from graphopt.demo.launch import Event, Reporter, run_ranks
from graphopt.demo.link import SlowLink, parse_rate

VARIANTS = {
    "eager DDP": None,
    "graphopt": {"pipeline": "default"},
    "graphopt, lowered": {"pipeline": "default", "lower": "inductor"},
}


@record
def work(task: Figures, folder: Path) -> None:
    """Train all variants in turns, on the same batches."""
    reporter = Reporter(folder)
    with process_group(folder, reporter):
        trainings = {}
        for name, options in VARIANTS.items():
            trainings[name] = Training("eager", task["model"], "adamw")
            if options is not None:
                trainings[name].trained = trainings[name].model
                trainings[name].step = graphopt.compile(train_step, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        names = list(VARIANTS)
        for number in range(WARM_UP_STEPS + task["rounds"]):
            length = ROUND if number >= WARM_UP_STEPS else 1
            batches = [batch(task["model"], generator) for _ in range(length)]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                seconds[name].append(trainings[name].seconds(batches))
        reporter.send("seconds", seconds=seconds)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn's steps by variant; of each turn the slowest rank counts."""
    task = {"model": options.model, "rounds": options.rounds}
    results: list[Event] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        prefixes, environment = None, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if options.link:
            link = stack.enter_context(SlowLink(parse_rate(options.link), options.ranks))
            prefixes, environment = link.prefixes, environment | link.environment
        run_ranks(
            [__file__, "--work", json.dumps(task)],
            options.ranks,
            folder,
            lambda rank, event: results.append(event),
            prefixes=prefixes,
            environment=environment,
        )
    return {
        name: [max(turn) for turn in zip(*(r["seconds"][name] for r in results), strict=True)]
        for name in VARIANTS
    }


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", metavar="RATE", help="emulate a slow link, such as 200mbit")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--rounds", type=int, default=12, help="turns of six steps, at least 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    return parser.parse_args()


def main() -> None:
    """Measure and print a table."""
    options = parse()
    if options.work:
        task, folder = options.work
        work(json.loads(task), Path(folder))
        return
    try:
        turns = measure(options)
    except DemoError as error:
        sys.exit(str(error))
    table = Table(title=f"{options.model}, {options.ranks} ranks, {options.link or 'loopback'}")
    for heading in ("variant", "step (median)", "/ eager DDP, paired", "/ graphopt, paired"):
        table.add_column(heading)
    steady = {name: seconds[WARM_UP_STEPS:] for name, seconds in turns.items()}
    ratios = {}
    for name, seconds in steady.items():
        ratios[name] = {
            other: spread([a / b for a, b in zip(seconds, steady[other], strict=True)])
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
