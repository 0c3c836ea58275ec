"""Steps of a program that holds `list(model.parameters())`, and of one that does not, in turns.

    python benchmarks/held_list.py
    python benchmarks/held_list.py --link 200mbit

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from step_models import MODELS, batch, train_step
from step_time import ROUND, WARM_UP_STEPS, Training, process_group
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo import DemoError
from graphopt.demo.launch import Event, Reporter, run_ranks
from graphopt.demo.link import SlowLink, parse_rate

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
    with process_group(folder, reporter):
        names = [FREE, HELD, FLUSHED]
        variants = {name: Variant(name, task["model"], task["pause"]) for name in names}
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(WARM_UP_STEPS + task["rounds"]):
            length = ROUND if number >= WARM_UP_STEPS else 1
            batches = [batch(task["model"], generator) for _ in range(length)]
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                seconds[name].append(variants[name].seconds(batches))
        reporter.send("seconds", seconds=seconds)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each turn's steps by variant; of each turn the slowest rank counts."""
    task = {"model": options.model, "rounds": options.rounds, "pause": options.pause / 1e3}
    results: list[Event] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphopt-")))
        prefixes, environment = None, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if options.link:
            link = stack.enter_context(SlowLink(parse_rate(options.link), options.ranks))
            prefixes, environment = link.prefixes, environment | link.environment
        command = [__file__, "--work", json.dumps(task)]
        run_ranks(
            command,
            options.ranks,
            folder,
            lambda rank, event: results.append(event),
            prefixes=prefixes,
            environment=environment,
        )
    return {
        name: [max(turn) for turn in zip(*(r["seconds"][name] for r in results), strict=True)]
        for name in (FREE, HELD, FLUSHED)
    }


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", metavar="RATE", help="emulate a slow link, such as 200mbit")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--pause", type=float, default=0.0, help="between two steps, in ms")
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
    steady = {name: seconds[WARM_UP_STEPS:] for name, seconds in turns.items()}
    table = Table(title=f"{options.model}, {options.ranks} ranks, {options.link or 'loopback'}")
    for heading in ("program", "step (median)", f"/ {FREE}, paired"):
        table.add_column(heading)
    ratios = {}
    for name, seconds in steady.items():
        ratios[name] = spread([a / b for a, b in zip(seconds, steady[FREE], strict=True)])
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
