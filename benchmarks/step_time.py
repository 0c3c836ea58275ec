"""A captured step against the eager one: time, memory, capture time, import time.

    python benchmarks/step_time.py --ranks 2 --model gpt
    python benchmarks/step_time.py --capture-only --layers 12
    python benchmarks/step_time.py --import-time

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, median_low

import ranks
import torch
import torch.distributed as dist
from ranks import ROUND, WARM_UP_STEPS
from rich.console import Console
from rich.table import Table
from spread import Figures, Row, show_spread, spread
from step_memory import tensor_peak
from step_models import MODELS, OPTIMIZERS, batch, train_step
from step_start import measure_captures, measure_imports
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.demo.compare import compare
from graphopt.demo.launch import Event, Reporter
from graphopt.demo.replica import RandomState
from graphopt.estimate.memory import peak_memory

CPU = torch.device("cpu")
MEMORY_STEPS = 5
MEMORY_RUNS = 3


class Training:
    """One variant of a model in training, with its own random numbers.

    Args:
        pipeline: of graphopt, where that is the variant.
    """

    def __init__(self, variant: str, model: str, optimizer: str, pipeline: str = "default") -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]()
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.model.parameters(), **options)
        self.trained = self.model
        self.step: Callable[..., Tensor] = train_step
        if variant == "graphopt":
            self.step = graphopt.compile(train_step, pipeline=pipeline)
        elif dist.is_initialized():
            self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.random = RandomState(1, CPU)

    def seconds(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Of one step, the mean of several one after another, until nothing is in flight."""
        self.random.restore()
        start = time.perf_counter()
        for inputs, targets in batches:
            self.step(self.trained, self.optimizer, inputs, targets)
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        seconds = time.perf_counter() - start
        self.random.save()
        return seconds / len(batches)


# -------------------------------------------------------------------------------- on each rank


@record
def work(task: Figures, folder: Path) -> None:
    """What a process does for `--model`: paired steps, or one variant alone."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        if task["alone"] is None:
            reporter.send("paired", **paired(task))
        else:
            reporter.send("alone", **alone(task))


def paired(task: Figures) -> Figures:
    """Both variants in turns on the same batches."""
    variants = ("eager", "graphopt")
    trainings = {v: _training(v, task) for v in variants}
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(WARM_UP_STEPS + task["steps"]):
        batches = [
            batch(task["model"], generator) for _ in range(ROUND if number >= WARM_UP_STEPS else 1)
        ]
        for variant in variants[:: 1 if number % 2 == 0 else -1]:
            if dist.is_initialized():
                dist.barrier()
            seconds[variant].append(trainings[variant].seconds(batches))
    eager, captured = (trainings[variant] for variant in variants)
    step = captured.step
    assert isinstance(step, graphopt.TrainStep)
    step.flush()
    same = compare((eager.model, eager.optimizer), (captured.model, captured.optimizer))
    return {
        "seconds": seconds,
        "nodes": len(step.graph_module.graph.nodes),
        "largest_difference": same.largest,
        "differing_tensors": len(same.differing),
    }


def alone(task: Figures) -> Figures:
    """Peak memory of one variant, from building it to steady steps."""
    generator = torch.Generator().manual_seed(0)

    def train() -> None:
        training = _training(task["alone"], task)
        for _ in range(WARM_UP_STEPS + MEMORY_STEPS):
            training.seconds([batch(task["model"], generator)])

    import_what_a_capture_imports()
    peak = tensor_peak(train) if task["memory"] == "tensors" else peak_memory(train, CPU)
    return {"peak": peak}


def _training(variant: str, task: Figures) -> Training:
    return Training(variant, task["model"], task["optimizer"], task["pipeline"])


def import_what_a_capture_imports() -> None:
    """In both variants alike: code is not what training needs more or less memory for."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(train_step, pipeline="none", parallel=graphopt.Manual())
    step(model, optimizer, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


# --------------------------------------------------------------------------------- measurements


def start_ranks(task: Figures, count: int) -> list[Event]:
    """Run `work` in fresh processes, which share the cores; one result per rank."""
    return ranks.run_work(__file__, task, count, one_thread=False)


def measure_steps(options: argparse.Namespace, console: Console) -> tuple[Figures, list[Row]]:
    """Paired step times, capture time and memory of one model and optimizer."""
    task: Figures = {"model": options.model, "optimizer": options.optimizer}
    task |= {"steps": options.steps, "pipeline": options.pipeline, "alone": None}
    with console.status("paired steps"):
        results = start_ranks(task, options.ranks)
    with console.status("peak memory of each variant alone"):
        memory = measure_memory(task, options.ranks)
    figures = step_figures(results) | {"memory": memory}
    return figures, step_rows(figures)


def measure_memory(task: Figures, count: int) -> dict[str, dict[str, int]]:
    """Bytes by kind and variant, each variant in processes of its own."""

    def peak(variant: str, kind: str) -> int:
        results = start_ranks(task | {"alone": variant, "memory": kind}, count)
        peaks: list[int] = [result["peak"] for result in results]
        return min(peaks) if kind == "tensors" else max(peaks)

    found: dict[str, dict[str, int]] = {"tensors": {}, "process": {}}
    for variant in ("graphopt", "eager"):
        found["tensors"][variant] = peak(variant, "tensors")
        found["process"][variant] = median_low(peak(variant, "process") for _ in range(MEMORY_RUNS))
    return found


def step_figures(results: list[Event]) -> Figures:
    """Of each step the slowest rank counts."""
    slowest = {
        variant: [max(step) for step in zip(*(r["seconds"][variant] for r in results), strict=True)]
        for variant in ("eager", "graphopt")
    }
    eager, captured = slowest["eager"][WARM_UP_STEPS:], slowest["graphopt"][WARM_UP_STEPS:]
    return {
        "seconds": {"eager": eager, "graphopt": captured},
        "ratio": spread([c / e for c, e in zip(captured, eager, strict=True)]),
        "first_calls_seconds": slowest["graphopt"][:WARM_UP_STEPS],
        "nodes": results[0]["nodes"],
        "largest_difference": max(rank["largest_difference"] for rank in results),
        "differing_tensors": sum(rank["differing_tensors"] for rank in results),
    }


def step_rows(figures: Figures) -> list[Row]:
    """The figures as a table's rows."""
    milliseconds = {v: 1e3 * median(figures["seconds"][v]) for v in ("eager", "graphopt")}
    rows = [
        ("step, eager (median)", f"{milliseconds['eager']:.2f} ms"),
        ("step, graphopt (median)", f"{milliseconds['graphopt']:.2f} ms"),
        (
            "step time ratio, paired",
            show_spread(figures["ratio"], len(figures["seconds"]["eager"])),
        ),
    ]
    for kind, peaks in figures["memory"].items():
        sizes = " / ".join(f"{peaks[v] / 2**20:.1f}" for v in ("graphopt", "eager"))
        ratio = peaks["graphopt"] / peaks["eager"]
        rows.append((f"peak memory ratio, {kind}", f"{ratio:.3f}  ({sizes} MiB)"))
    calls = ", ".join(f"{seconds:.2f} s" for seconds in figures["first_calls_seconds"])
    rows.append(("first calls (capture)", calls))
    rows.append(("graph nodes", str(figures["nodes"])))
    difference = (
        f"{figures['largest_difference']:g} ({figures['differing_tensors']} tensors differ)"
    )
    rows.append(("largest difference", difference))
    return rows


# -------------------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    """The options."""
    parser = ranks.parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--capture-only", action="store_true", help="capture time and graph size")
    what.add_argument(
        "--import-time", action="store_true", help="import graphopt over import torch"
    )
    parser.add_argument("--ranks", type=int, default=1, help="1: eager; more: eager DDP on gloo")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--pipeline", default="default", help="of graphopt: default, none or auto")
    parser.add_argument("--steps", type=int, default=12, help="pairs of six steps each, at least 2")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT of --capture-only")
    return parser.parse_args()


def main() -> None:
    """Measure what the command line asks for and print it."""
    options = parse()
    if ranks.works(options, work):
        return
    console = Console()
    title = f"{options.model}, {options.optimizer}, {options.pipeline}, ranks: {options.ranks}"
    if options.import_time:
        title, (figures, rows) = "import time", measure_imports(console)
    elif options.capture_only:
        title, (figures, rows) = "capture", measure_captures(options.layers, console)
    else:
        with ranks.failures_shown():
            figures, rows = measure_steps(options, console)
    table = Table("", "", title=f"{title} (torch {torch.__version__})", show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, title: figures}, indent=2))


if __name__ == "__main__":
    main()
