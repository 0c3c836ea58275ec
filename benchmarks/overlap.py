"""How much of the communication a step hides: pipelines, DDP, and the bound, on emulated hosts.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --models stack gpt --ratios 0.5 1 2 --ranks 4 --json overlap.json
    python benchmarks/overlap.py --clip --plot overlap.png
    torchrun --nproc-per-node=8 benchmarks/overlap.py --models gpt

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import ranks
import torch
import torch.distributed as dist
from overlap_models import OVERLAP_MODELS, clipped_step, overlap_batch
from ranks import paired, slowest
from rich.console import Console
from rich.table import Table
from spread import Figures, spread
from step_models import train_step
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.demo.launch import Event, Reporter
from graphopt.demo.replica import RandomState
from graphopt.stages.pipelines import MIN_BUCKETS, default_pipeline

COMPUTE, COMMUNICATION, BOUND = "compute alone", "communication alone", "bound"
DDP_DEFAULT = "DDP, 25 MB"
CHUNK = 2**20
Batches = Sequence[tuple[Tensor, Tensor]]


class Variant(Protocol):
    """Something that takes a turn."""

    def run(self, batches: Batches) -> None:
        """All steps of a turn, until nothing is in flight."""


class Training:
    """A model in training by a step function.

    Args:
        buckets_mb: of DistributedDataParallel; None: the bare model.
        pipeline: of graphopt; None: the step as it is.
    """

    def __init__(
        self, task: Figures, buckets_mb: float | None = None, pipeline: Any | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = OVERLAP_MODELS[task["model"]]().to(device())
        self.trained: nn.Module = self.model
        if buckets_mb is not None:
            self.trained = DistributedDataParallel(
                self.model,
                bucket_cap_mb=buckets_mb,
                gradient_as_bucket_view=True,
                static_graph=True,
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step: Callable[..., Tensor] = clipped_step if task["clip"] else train_step
        if pipeline is not None:
            self.step = graphopt.compile(self.step, pipeline=pipeline)
        self._random = RandomState(1, device())

    def run(self, batches: Batches) -> None:
        """One step for each batch, with random numbers of its own."""
        self._random.restore()
        for inputs, targets in batches:
            self.step(self.trained, self.optimizer, inputs, targets)
        if isinstance(self.step, graphopt.TrainStep):
            self.step.flush()
        self._random.save()


class Communication:
    """The bytes of all gradients in chunks, with nothing else to do."""

    def __init__(self, task: Figures) -> None:
        size = gradient_bytes(task["model"])
        flat = torch.zeros(size // 4, device=device())
        self._chunks = flat.split(CHUNK // 4)

    def run(self, batches: Batches) -> None:
        """One average of all chunks for each batch."""
        for _ in batches:
            works = [dist.all_reduce(chunk, async_op=True) for chunk in self._chunks]
            for work in works:
                work.wait()


def device() -> torch.device:
    """Of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def gradient_bytes(model: str) -> int:
    """That a step of a model averages."""
    with torch.device("meta"):
        return sum(p.nbytes for p in OVERLAP_MODELS[model]().parameters())


def variants(task: Figures) -> dict[str, Variant]:
    """All that take turns, by name."""
    plain = [entry[0] if isinstance(entry, tuple) else entry for entry in default_pipeline()]
    buckets = (plain[1], {"min_buckets": MIN_BUCKETS})
    made: dict[str, Variant] = {
        COMPUTE: Training(task),
        COMMUNICATION: Communication(task),
        DDP_DEFAULT: Training(task, buckets_mb=25),
    }
    for size in task["sweep"]:
        made[f"DDP, {size:g} MB"] = Training(task, buckets_mb=size)
    made["graphopt, 25 MB"] = Training(task, pipeline=plain)
    made["graphopt, as they come"] = Training(task, pipeline=[plain[0], buckets, *plain[2:]])
    made["graphopt, default"] = Training(task, pipeline="default")
    return made | {text: Training(task, pipeline=text) for text in task["pipelines"]}


# -------------------------------------------------------------------------------- on each rank


def turns(task: Figures) -> Figures:
    """Seconds per step of each turn by variant, and how far parameters are from DDP's."""
    made = {COMPUTE: Training(task)} if task["compute_only"] else variants(task)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def given() -> tuple[Tensor, Tensor]:
        inputs, targets = overlap_batch(task["model"], generator)
        return inputs.to(device()), targets.to(device())

    seconds = ranks.in_turns(
        list(made),
        lambda name, batches: timed(made[name], batches),
        given,
        task["rounds"],
        task["turn"],
    )
    return {"seconds": seconds, "differences": differences(made)}


def timed(variant: Variant, batches: Batches) -> float:
    """Seconds per step of one turn."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    variant.run(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(batches)


def differences(made: dict[str, Variant]) -> dict[str, float]:
    """The largest difference of any parameter to DDP's, by variant."""
    reference = made.get(DDP_DEFAULT)
    if not isinstance(reference, Training):
        return {}
    found = {}
    for name, variant in made.items():
        if isinstance(variant, Training) and name != COMPUTE:
            pairs = zip(variant.model.parameters(), reference.model.parameters(), strict=True)
            found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@record
def work(task: Figures, folder: Path) -> None:
    """What an emulated host does."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        reporter.send("turns", **turns(task))


# ------------------------------------------------------------------------------------ launching


def link_rate(model: str, compute_seconds: float, ratio: float, hosts: int) -> float:
    """Bit/s at which a ring sends a step's gradients in `ratio` times the compute."""
    sent = 8 * gradient_bytes(model) * 2 * (hosts - 1) / hosts
    return sent / (ratio * compute_seconds)


def task_of(model: str, options: argparse.Namespace) -> Figures:
    """What a rank is to do, as JSON."""
    names = ("clip", "sweep", "pipelines", "rounds", "turn")
    chosen = {name: getattr(options, name) for name in names}
    return {"model": model, "compute_only": False, **chosen}


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """One row of figures for each model and ratio."""
    for model in options.models:
        task = task_of(model, options) | {"compute_only": True}
        alone = slowest(ranks.run_work(__file__, task, options.ranks))[COMPUTE]
        task["compute_only"] = False
        for ratio in options.ratios:
            rate = link_rate(model, median(alone), ratio, options.ranks) if ratio else None
            results = ranks.run_work(__file__, task, options.ranks, rate)
            yield figures(model, ratio, rate, results)


def figures(model: str, ratio: float, rate: float | None, results: list[Event]) -> Figures:
    """Medians, and ratios to the bound and to the best DDP of each round."""
    seconds = slowest(results)
    bound = [max(a, b) for a, b in zip(seconds[COMPUTE], seconds[COMMUNICATION], strict=True)]
    ddp = [name for name in seconds if name.startswith("DDP")]
    best = min(ddp, key=lambda name: median(seconds[name]))
    return {
        "model": model,
        "ratio": ratio,
        "bits_per_second": rate,
        "best_ddp": best,
        "seconds": seconds,
        "per_bound": {name: spread(paired(times, bound)) for name, times in seconds.items()},
        "per_best": {name: spread(paired(times, seconds[best])) for name, times in seconds.items()},
        "differences": results[0]["differences"],
    }


# -------------------------------------------------------------------------------------- showing


def table(row: Figures) -> Table:
    """One model on one link."""
    rate = row["bits_per_second"]
    link = "no shaped link" if rate is None else f"{rate / 1e6:.0f} Mbit/s"
    made = Table(title=f"{row['model']}, communication / compute set to {row['ratio']:g} ({link})")
    for heading in ("variant", "step, ms", "/ bound", "/ best DDP", "max |Δ| to DDP"):
        made.add_column(heading)
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
    """Median and quartiles."""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f}-{high:.3f}]"


def plot(rows: Sequence[Figures], path: Path) -> None:
    """Step time against the bound, one line for each variant, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for name in mine[0]["per_bound"]:
            if name not in (COMPUTE, COMMUNICATION):
                heights = [row["per_bound"][name]["median"] for row in mine]
                panel.plot([row["ratio"] for row in mine], heights, marker="o", label=name)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set(
            title=model, xlabel="communication / compute", ylabel="step / bound", xscale="log"
        )
    panels[0][-1].legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")


@contextmanager
def torchrun_group() -> Iterator[None]:
    """The group that torchrun's environment describes."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_real_hosts(options: argparse.Namespace) -> list[Figures]:
    """Under torchrun: the link is what it is; rank 0 has the figures."""
    rows = []
    with torchrun_group():
        for model in options.models:
            mine = turns(task_of(model, options))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            if dist.get_rank() == 0:
                rows.append(figures(model, 0.0, None, everyone))
    return rows


def parse() -> argparse.Namespace:
    """The options."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="emulated hosts")
    parser.add_argument("--models", nargs="+", choices=OVERLAP_MODELS, default=["stack"])
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        default=[1.0],
        help="communication / compute that the link is set for; 0: no shaped link",
    )
    parser.add_argument("--sweep", nargs="*", type=float, default=[0.5, 1, 2, 4], help="MB")
    parser.add_argument("--pipelines", nargs="*", default=[], help="further ones, as text")
    parser.add_argument(
        "--turn", type=int, default=10, help="steps of one variant before the next one's turn"
    )
    parser.add_argument("--clip", action="store_true", help="clip by the norm of all gradients")
    parser.add_argument("--rounds", type=int, default=10, help="turns, at least 2")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw step time against the bound"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print tables, write files."""
    options = parse()
    if ranks.works(options, work):
        return
    rows: list[Figures] = []
    with ranks.failures_shown():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            rows = on_real_hosts(options)
        else:
            for row in measure(options):
                Console().print(table(row))
                rows.append(row)
    if not rows:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for row in rows:
            Console().print(table(row))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
