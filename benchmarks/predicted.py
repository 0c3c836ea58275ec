"""Does the simulator say how long steps take? Predicted and measured steps, on emulated hosts.

    python benchmarks/predicted.py
    python benchmarks/predicted.py --models stack gpt --ratios 0.5 1 2 --json predicted.json

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import ranks
import torch
import torch.distributed as dist
from overlap import Training, link_bits, link_rate, timed
from overlap_bound import calibrated
from overlap_models import OVERLAP_MODELS, overlap_batch
from rich.console import Console
from rich.table import Table
from spread import Figures, spread
from step_models import train_step
from torch.distributed.elastic.multiprocessing.errors import record

import graphopt
from graphopt.demo.launch import Event, Reporter
from graphopt.stages import default_pipeline

COMPUTE = "compute alone"


def pipelines() -> dict[str, list[object] | str]:
    """What is predicted: the default, its buckets as they come, and one that hides little."""
    plain = [entry[0] if isinstance(entry, tuple) else entry for entry in default_pipeline()]
    buckets = (plain[1], {"min_buckets": None})
    return {"default": "default", "as they come": [plain[0], buckets, *plain[2:]], "25 MB": plain}


@record
def work(task: Figures, folder: Path) -> None:
    """Train, calibrate, simulate."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        made = {COMPUTE: Training(task)}
        if not task["compute_only"]:
            made |= {name: Training(task, pipeline=p) for name, p in pipelines().items()}
        generator = torch.Generator().manual_seed(dist.get_rank())
        seconds = ranks.in_turns(
            list(made),
            lambda name, batches: timed(made[name], batches),
            lambda: overlap_batch(task["model"], generator),
            task["rounds"],
            task["turn"],
        )
        predicted = {}
        if not task["compute_only"]:
            alone = made[COMPUTE]
            args = (alone.model, alone.optimizer, *overlap_batch(task["model"], generator))
            captured = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
            costs = calibrated(captured, train_step, args, folder)
            predicted = {
                name: graphopt.simulate(training.step.graph_module, costs).step_seconds
                for name, training in made.items()
                if isinstance(training.step, graphopt.TrainStep)
            }
        reporter.send("turns", seconds=seconds, predicted=predicted)


def figures(model: str, ratio: float, results: list[Event]) -> list[Figures]:
    """One row for each pipeline."""
    seconds = ranks.slowest(results)
    return [
        {
            "model": model,
            "ratio": ratio,
            "pipeline": name,
            "measured": median(seconds[name]),
            "predicted": predicted,
            "predicted / measured": spread([predicted / second for second in seconds[name]]),
        }
        for name, predicted in results[0]["predicted"].items()
    ]


def table(rows: list[Figures]) -> Table:
    """All configurations."""
    made = Table(title="predicted and measured steps")
    for heading in ("model", "ratio", "pipeline", "predicted, ms", "measured, ms", "ratio of both"):
        made.add_column(heading)
    for row in rows:
        found = row["predicted / measured"]
        low, high = found["quartiles"]
        made.add_row(
            row["model"],
            f"{row['ratio']:g}",
            row["pipeline"],
            f"{1e3 * row['predicted']:.1f}",
            f"{1e3 * row['measured']:.1f}",
            f"{found['median']:.3f} [{low:.3f}-{high:.3f}]",
        )
    return made


def main() -> None:
    """Measure and print a table."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=OVERLAP_MODELS, default=["stack"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=4, help="turns, at least 2")
    parser.add_argument("--turn", type=int, default=20, help="steps of a turn")
    options = parser.parse_args()
    if ranks.works(options, work):
        return
    rows: list[Figures] = []
    with ranks.failures_shown():
        for model in options.models:
            task = {"model": model, "form": "plain", "rounds": options.rounds, "turn": options.turn}
            first = ranks.run_work(__file__, task | {"compute_only": True}, 2)
            alone = min(ranks.slowest(first)[COMPUTE])
            for ratio in options.ratios:
                rate = link_rate(link_bits(model, 2), alone, ratio)
                results = ranks.run_work(__file__, task | {"compute_only": False}, 2, rate)
                rows += figures(model, ratio, results)
    Console().print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
