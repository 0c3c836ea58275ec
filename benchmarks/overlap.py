"""Benchmark of hidden communication: pipelines, DDP, and the bound, on emulated hosts.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --models stack gpt --ratios 0.5 1 2 --ranks 4 --json overlap.json
    python benchmarks/overlap.py --models gpt --forms plain people accumulate

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import ranks
import torch
import torch.distributed as dist
from emulated_link import set_rate
from ranks import WARM_UP_STEPS, Event, RandomState, Reporter, paired, slowest
from rich.table import Table
from spread import Figures, spread
from step_models import FORMS, MODELS, average_of, drawn_batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import graphopt

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
DDP_DEFAULT = "DDP, 25 MB"
_OF_NEWER_VERSIONS = {"batched_grad_copy": True}
_KNOWN = inspect.signature(DistributedDataParallel).parameters
DDP_OPTIONS = {name: value for name, value in _OF_NEWER_VERSIONS.items() if name in _KNOWN}
CHUNK = 2**20
Batches = Sequence[tuple[Tensor, Tensor]]


class Training:
    """A model that one variant trains.

    Args:
        buckets_mb: the bucket size of DistributedDataParallel; None: the bare model.
        pipeline: the pipeline of graphopt; None: the eager step.
    """

    def __init__(
        self, task: Figures, buckets_mb: float | None = None, pipeline: Any | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = MODELS[task["model"]]()
        self.trained: nn.Module = self.model
        if buckets_mb is not None:
            self.trained = DistributedDataParallel(
                self.model,
                bucket_cap_mb=buckets_mb,
                gradient_as_bucket_view=True,
                static_graph=not FORMS[task["form"]].local,
                **DDP_OPTIONS,
            )
        self.form = FORMS[task["form"]]
        self.besides = (average_of(self.model),) if self.form.averaged else ()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._schedule = LambdaLR(self.optimizer, lambda number: 1 / (1 + number))
        self.step: Callable[..., Tensor] = self.form.step
        if pipeline is not None:
            self.step = graphopt.compile(self.step, pipeline=pipeline)
        self._random = RandomState(1)

    def run(self, batches: Batches) -> None:
        """Runs one step for each batch, with random numbers of its own."""
        self._random.restore()
        for inputs, targets in batches:
            loss = self.step(self.trained, self.optimizer, inputs, targets, *self.besides)
            if self.form.scheduled:
                self._schedule.step()
            if self.form.read:
                loss.item()
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        self._random.save()


class Communication:
    """The communication of a step alone: the bytes of all gradients, in chunks."""

    def __init__(self, task: Figures) -> None:
        size = gradient_bytes(task["model"])
        flat = torch.zeros(size // 4)
        self._chunks = flat.split(CHUNK // 4)

    def run(self, batches: Batches) -> None:
        """Averages all chunks once for each batch."""
        for _ in batches:
            for work in self.launch():
                work.wait()

    def launch(self) -> list[dist.Work]:
        """Launches the averages of one step."""
        return [dist.all_reduce(chunk, async_op=True) for chunk in self._chunks]


def gradient_bytes(model: str) -> int:
    """The bytes that a step of a model averages."""
    with torch.device("meta"):
        return sum(p.nbytes for p in MODELS[model]().parameters())


def variants(task: Figures) -> dict[str, Any]:
    """All variants that take turns, by name."""
    made: dict[str, Any] = {
        COMPUTE: Training(task),
        COMMUNICATION: Communication(task),
        DDP_DEFAULT: Training(task, buckets_mb=25),
    }
    for size in task["sweep"]:
        made[f"DDP, {size:g} MB"] = Training(task, buckets_mb=size)
    for name in ("default", "auto"):
        made[f"graphopt, {name}"] = Training(task, pipeline=name)
    return made | {text: Training(task, pipeline=text) for text in task["pipelines"]}


# -------------------------------------------------------------------------------- on each rank


class AdjustedLink:
    """An emulated link whose rate follows the machine's changing speed, round by round.

    Attributes:
        rates: the rates in bit/s, one for each round.
    """

    def __init__(self, task: Figures) -> None:
        self.rates: list[float] = []
        self._computes: list[float] = []
        self._ratio, self._rate = task["ratio"], task["bits_per_second"]
        self._bits = link_bits(task["model"], dist.get_world_size())

    def after(self, name: str, seconds: float) -> None:
        """After a turn of compute alone, sets the rate at which communication takes `ratio`
        times the compute of the last three rounds; a turn of communication alone measures the
        bytes sent."""
        if name not in (COMPUTE, COMMUNICATION):
            return
        taken = torch.tensor(seconds)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if name == COMMUNICATION:
            self._bits = taken.item() * self._rate
        else:
            self._computes.append(taken.item())
            self._rate = link_rate(self._bits, median(self._computes[-3:]), self._ratio)
            set_rate(self._rate)
            self.rates.append(self._rate)


def turns(task: Figures) -> Figures:
    """Runs all turns; returns seconds per step by variant, and parameter differences to DDP."""
    made = {COMPUTE: Training(task)} if task["compute_only"] else variants(task)
    generator = torch.Generator().manual_seed(dist.get_rank())
    calls: Counter[str] = Counter()

    def given() -> tuple[Tensor, Tensor]:
        return drawn_batch(task["model"], generator, task["batch"])

    link = AdjustedLink(task) if task["bits_per_second"] else None

    def seconds(name: str, batches: Batches) -> float:
        taken = timed(made[name], batches)
        calls[name] += 1
        if calls[name] > WARM_UP_STEPS and link is not None:
            link.after(name, taken)
        return taken

    first = 0 if link is None else 1
    found = ranks.in_turns(list(made), seconds, given, task["rounds"], task["turn"], first)
    result = {"seconds": found, "differences": differences(made)}
    result["rates"] = None if link is None else link.rates
    return result


def timed(variant: Any, batches: Batches) -> float:
    """The seconds per step of one turn."""
    start = time.perf_counter()
    variant.run(batches)
    return (time.perf_counter() - start) / len(batches)


def differences(made: dict[str, Any]) -> dict[str, float]:
    """The largest difference of any parameter to DDP's, by variant."""
    reference = next((v for n, v in made.items() if n.startswith("DDP,")), None)
    if reference is None:
        return {}
    found = {}
    for name, variant in made.items():
        if not hasattr(variant, "model") or name == COMPUTE:
            continue
        pairs = zip(variant.model.parameters(), reference.model.parameters(), strict=True)
        found[name] = max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)
    return found


def whole(tensor: Any) -> Tensor:
    """The whole tensor, gathered on all ranks."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def work(task: Figures, folder: Path) -> None:
    """Runs the task of one emulated host."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        reporter.send("turns", **turns(task))


# ------------------------------------------------------------------------------------ launching


def link_rate(bits: float, compute_seconds: float, ratio: float) -> float:
    """The rate in bit/s at which a step's communication takes `ratio` times its compute."""
    return bits / (ratio * compute_seconds)


def link_bits(model: str, hosts: int) -> float:
    """The bits that each host of a ring sends for a step's gradients."""
    return 8 * gradient_bytes(model) * 2 * (hosts - 1) / hosts


def task_of(model: str, form: str, options: argparse.Namespace) -> Figures:
    """The task of a rank, as JSON."""
    names = ["sweep", "pipelines", "rounds", "turn", "batch"]
    chosen = {name: getattr(options, name) for name in names}
    unshaped = {"compute_only": False, "ratio": 0.0, "bits_per_second": None}
    return {"model": model, "form": form, **unshaped, **chosen}


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures one row of figures for each model, form and ratio."""
    for model, form in product(options.models, options.forms):
        task = task_of(model, form, options)
        few = task | {"compute_only": True, "rounds": 3}
        alone = min(slowest(ranks.run_work(__file__, few, options.ranks))[COMPUTE])
        for ratio in options.ratios:
            bits = link_bits(model, options.ranks)
            rate = link_rate(bits, alone, ratio) if ratio else None
            shaped = task | {"ratio": ratio, "bits_per_second": rate}
            yield figures(shaped, ranks.run_work(__file__, shaped, options.ranks, rate))


def figures(task: Figures, results: list[Event]) -> Figures:
    """The medians, and the ratios to the bounds and to the best DDP of each round."""
    seconds, rates = slowest(results), results[0]["rates"]
    bound = [max(a, b) for a, b in zip(seconds[COMPUTE], seconds[COMMUNICATION], strict=True)]
    ddp = [name for name in seconds if name.startswith("DDP")]
    best = min(ddp, key=lambda name: median(seconds[name]))
    return {
        "model": task["model"],
        "form": task["form"],
        "batch": task["batch"],
        "ratio": task["ratio"],
        "bits_per_second": rates and median(rates),
        "best_ddp": best,
        "seconds": seconds,
        "per_bound": {name: spread(paired(times, bound)) for name, times in seconds.items()},
        "per_best": {name: spread(paired(times, seconds[best])) for name, times in seconds.items()},
        "differences": results[0]["differences"],
    }


def table(row: Figures) -> Table:
    """The table of one model on one link."""
    rate = row["bits_per_second"]
    link = "no shaped link" if rate is None else f"{rate / 1e6:.0f} Mbit/s"
    made = Table(
        *("variant", "ms", "/ bound", "/ best DDP", "|Δ|"),
        title=f"{row['model']}, {row['form']}, batch x {row['batch']}, communication / compute set"
        f" to {row['ratio']:g} ({link})",
    )
    for name, times in row["seconds"].items():
        difference = row["differences"].get(name)
        made.add_row(
            name + (" (best)" if name == row["best_ddp"] else ""),
            f"{1e3 * median(times):.1f}",
            shown(row["per_bound"][name]),
            shown(row["per_best"][name]),
            "" if difference is None else f"{difference:g}",
        )
    return made


def shown(found: Figures) -> str:
    """The median and quartiles as text."""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f}-{high:.3f}]"


# ------------------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    """Parses the command line options."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="emulated hosts")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["stack"])
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        default=[1.0],
        help="communication / compute that the link is set for; 0: no shaped link",
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["plain"])
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="N times the batch: sending takes less of the cores beside N times the compute",
    )
    parser.add_argument("--sweep", nargs="*", type=float, default=[0.25, 0.5, 1, 2, 5], help="MB")
    parser.add_argument("--pipelines", nargs="*", default=[], help="further ones, as text")
    parser.add_argument(
        "--turn", type=int, default=20, help="steps of one variant before the next one's turn"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns, at least 2")
    return parser.parse_args()


def main() -> None:
    """Measures, prints tables and writes files."""
    options = parse()
    if ranks.works(options, work):
        return
    ranks.tabulate(options, measure(options), table)


if __name__ == "__main__":
    main()
