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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import figures
import ranks
import torch
import torch.distributed as dist
from emulated_link import set_rate
from figures import Figures, spread, spread_text
from ranks import WARM_UP_STEPS, paired, slowest
from rich.table import Table
from step_models import FORMS, MODELS, average_of, drawn_batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import graphopt

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
_OF_NEWER_VERSIONS = {"batched_grad_copy": True}
_KNOWN = inspect.signature(DistributedDataParallel).parameters
DDP_OPTIONS = {name: value for name, value in _OF_NEWER_VERSIONS.items() if name in _KNOWN}
ADAM: dict[str, Any] = {"lr": 1e-3, "fused": True}
CHUNK = 2**20
Batches = Sequence[tuple[Tensor, Tensor]]


class Training:
    """A model that one variant trains, with random numbers of its own.

    Args:
        buckets_mb: the bucket size of DistributedDataParallel; None: the bare model.
        compiled: options of `graphopt.compile`; none: the eager step.
    """

    def __init__(self, task: Figures, buckets_mb: float | None = None, **compiled: Any) -> None:
        torch.manual_seed(0)
        self.model = MODELS[task["model"]]()
        self.trained: nn.Module = self.model
        self.form = FORMS[task["form"]]
        if buckets_mb is not None:
            self.trained = DistributedDataParallel(
                self.model,
                bucket_cap_mb=buckets_mb,
                gradient_as_bucket_view=True,
                static_graph=not self.form.local,
                **DDP_OPTIONS,
            )
        self.besides = (average_of(self.model),) if self.form.averaged else ()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **ADAM)
        if self.form.scheduled:
            self._schedule = LambdaLR(self.optimizer, lambda number: 1 / (1 + number))
        self.step: Callable[..., Tensor] = self.form.step
        if compiled:
            self.step = graphopt.compile(self.step, **compiled)
        torch.manual_seed(1)
        self._random = torch.get_rng_state()

    def run(self, batches: Batches) -> None:
        """Runs one step for each batch."""
        torch.set_rng_state(self._random)
        for inputs, targets in batches:
            loss = self.step(self.trained, self.optimizer, inputs, targets, *self.besides)
            if self.form.scheduled:
                self._schedule.step()
            if self.form.read:
                loss.item()
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        self._random = torch.get_rng_state()


class Communication:
    """The communication of a step alone: the bytes of all gradients, in chunks."""

    def __init__(self, task: Figures) -> None:
        self._chunks = torch.zeros(gradient_bytes(task["model"]) // 4).split(CHUNK // 4)

    def run(self, batches: Batches) -> None:
        """Averages all chunks once for each batch."""
        for _ in batches:
            for work in [dist.all_reduce(chunk, async_op=True) for chunk in self._chunks]:
                work.wait()


def gradient_bytes(model: str) -> int:
    """The bytes that a step of a model averages."""
    with torch.device("meta"):
        return sum(p.nbytes for p in MODELS[model]().parameters())


def variants(task: Figures) -> dict[str, Any]:
    """All variants that take turns, by name."""
    made: dict[str, Any] = {COMPUTE: Training(task), COMMUNICATION: Communication(task)}
    for size in (25, *task["sweep"]):
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
    """Runs all turns of all variants."""
    return take_turns(task, {COMPUTE: Training(task)} if task["alone"] else variants(task))


def batches_of(task: Figures) -> Callable[[], tuple[Tensor, Tensor]]:
    """A source of this rank's batches."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return partial(drawn_batch, task["model"], generator, task["batch"])


def take_turns(task: Figures, made: Mapping[str, Any]) -> Figures:
    """Runs all turns of variants; returns by variant the seconds and sent bytes of a step and the
    parameters' differences to DDP, and the link's rates."""
    link = AdjustedLink(task) if task["bits_per_second"] else None
    sent: dict[str, list[float]] = {name: [] for name in made}

    def seconds(name: str, batches: Batches) -> float:
        before, start = sent_bytes(), time.perf_counter()
        made[name].run(batches)
        taken = (time.perf_counter() - start) / len(batches)
        sent[name].append((sent_bytes() - before) / len(batches))
        if len(sent[name]) > WARM_UP_STEPS and link is not None:
            link.after(name, taken)
        return taken

    given, first = batches_of(task), 0 if link is None else 1
    return {
        "seconds": ranks.in_turns(list(made), seconds, given, task["rounds"], task["turn"], first),
        "sent": {name: median(values) for name, values in sent.items()},
        "rates": None if link is None else link.rates,
        "differences": differences(made),
    }


def sent_bytes() -> int:
    """The bytes that this host has sent over its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "link0":
            return int(counts.split()[8])
    return 0


def differences(made: Mapping[str, Any]) -> dict[str, float]:
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


# ------------------------------------------------------------------------------------ launching


def link_rate(bits: float, compute_seconds: float, ratio: float) -> float:
    """The rate in bit/s at which a step's communication takes `ratio` times its compute."""
    return bits / (ratio * compute_seconds)


def link_bits(model: str, hosts: int) -> float:
    """The bits that each host of a ring sends for a step's gradients."""
    return 8 * gradient_bytes(model) * 2 * (hosts - 1) / hosts


def measure(
    script: str, options: argparse.Namespace, row: Callable[[Figures, list[Figures]], Figures]
) -> Iterator[Figures]:
    """Measures one row of figures for each model, form and ratio, on ranks that run `script`."""
    chosen = {name: value for name, value in vars(options).items() if name not in ("work", "json")}
    for model, form in product(options.models, options.forms):
        task = chosen | {"model": model, "form": form, "alone": False}
        few = task | {"alone": True, "bits_per_second": None, "rounds": 3}
        alone = min(slowest(ranks.run_work(script, few, options.ranks))[COMPUTE])
        for ratio in options.ratios:
            bits = link_bits(model, options.ranks)
            rate = link_rate(bits, alone, ratio) if ratio else None
            shaped = task | {"ratio": ratio, "bits_per_second": rate}
            yield row(shaped, ranks.run_work(script, shaped, options.ranks, rate))


def row_of(task: Figures, results: list[Figures]) -> Figures:
    """The medians, and the ratios to the bounds and to the best DDP of each round."""
    seconds = slowest(results)
    bound = [max(a, b) for a, b in zip(seconds[COMPUTE], seconds[COMMUNICATION], strict=True)]
    ddp = [name for name in seconds if name.startswith("DDP")]
    best = min(ddp, key=lambda name: median(seconds[name]))
    return {
        **{key: task[key] for key in ("model", "form", "batch", "ratio")},
        **{key: results[0][key] for key in ("rates", "differences")},
        "best_ddp": best,
        "seconds": seconds,
        "per_bound": {name: spread(paired(times, bound)) for name, times in seconds.items()},
        "per_best": {name: spread(paired(times, seconds[best])) for name, times in seconds.items()},
    }


def table(row: Figures) -> Table:
    """The table of one model on one link."""
    title = f"{row['model']}, {row['form']}, batch x {row['batch']}"
    return figures.table(
        [
            {
                "variant": name + (" (best)" if name == row["best_ddp"] else ""),
                "ms": f"{1e3 * median(times):.1f}",
                "/ bound": spread_text(row["per_bound"][name]),
                "/ best DDP": spread_text(row["per_best"][name]),
                "|Δ|": f"{row['differences'][name]:g}" if name in row["differences"] else "",
            }
            for name, times in row["seconds"].items()
        ],
        title=f"{title}, communication / compute set to {row['ratio']:g} ({link_of(row)})",
    )


def link_of(row: Figures) -> str:
    """The link on which a row was measured."""
    return f"{median(row['rates']) / 1e6:.0f} Mbit/s" if row["rates"] else "no shaped link"


# ------------------------------------------------------------------------------- command line


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks with emulated hosts have."""
    parser = ranks.parser(doc)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["stack"])
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        default=[1.0],
        help="communication / compute that the link is set for; 0: no shaped link",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="N times the batch: sending takes less of the cores beside N times the compute",
    )
    parser.add_argument("--sweep", nargs="*", type=float, default=[0.25, 0.5, 1, 2, 5], help="MB")
    parser.add_argument(
        "--turn", type=int, default=20, help="steps of one variant before the next one's turn"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns, at least 2")
    return parser


def main() -> None:
    """Measures, prints tables and writes files."""
    parser = parser_of(__doc__)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["plain"])
    parser.add_argument("--pipelines", nargs="*", default=[], help="further ones, as text")
    options = parser.parse_args()
    if not ranks.works(options, turns):
        figures.tabulate(options, measure(__file__, options, row_of), table)


if __name__ == "__main__":
    main()
