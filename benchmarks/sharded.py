"""Benchmark of sharded training on slow links: ZeRO-1 and ZeRO-3, DDP with and without its sharded
optimizer, FSDP2.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --models stack gpt --ratios 0.5 1 2 --rounds 6 --json sharded.json

Each model trains in turns in one run, on emulated hosts whose link is set so that one all-reduce of
all gradients takes `ratio` times the compute of a step. Ratios are of turns of one round; bytes are
what a host sends, by the kernel's count, headers included. Peak memory is what a training keeps
(parameters, state, buckets) and what its steps allocate beside that, at most; both are measured
before the turns, when no other variant runs.

A variant of which a turn takes longer than `--limit` is left out, and the others begin again. Where
a rank dies, the variants that it has run last are shown with the stacks of its threads.
Rounds end when `--minutes` are over.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import ranks
import torch
import torch.distributed as dist
from overlap import (
    COMMUNICATION,
    COMPUTE,
    AdjustedLink,
    Communication,
    Training,
    differences,
    link_bits,
    link_rate,
    timed,
)
from ranks import WARM_UP_STEPS, Event, RankFailedError, Reporter, paired, slowest
from rich.console import Console
from rich.table import Table
from sharded_variants import PLAIN, TUNED, FullySharded, Sharded, ZeroOptimizer
from spread import Figures, spread
from step_memory import bucket_bytes, has_mallinfo, kept_bytes, rise
from step_models import MODELS, drawn_batch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

Makers = dict[str, Callable[[], Any]]

OPTIMIZER = "DDP + ZeroRedundancyOptimizer"


MEASURED_STEPS = 4
"""Of each variant, for its memory."""


def variants(task: Figures) -> Makers:
    """All variants that take turns, by name."""
    sizes = {f"DDP, {size:g} MB": size for size in task["sweep"]}
    makers: Makers = {
        COMPUTE: lambda: Training(task),
        COMMUNICATION: lambda: Communication(task),
        **{name: lambda mb=size: Training(task, buckets_mb=mb) for name, size in sizes.items()},
        **{
            f"{OPTIMIZER}, {size:g} MB": lambda mb=size: ZeroOptimizer(task, mb)
            for size in task["sweep"][:2]
        },
        PLAIN: lambda: FullySharded(task),
        TUNED: lambda: FullySharded(task, tuned=True),
        f"{TUNED}, kept": lambda: FullySharded(task, tuned=True, reshard=False),
        "graphopt, stage 1": lambda: Sharded(task, 1),
        "graphopt, stage 3": lambda: Sharded(task, 3),
        "graphopt, stage 3, kept": lambda: Sharded(task, 3, keep_mb=1e6),
    }
    chosen, always = task["variants"], (COMPUTE, COMMUNICATION)
    return {
        name: make
        for name, make in makers.items()
        if name not in task["left_out"]
        and (not chosen or name in always or any(c in name for c in chosen))
    }


@contextmanager
def limited(name: str, seconds: float, reporter: Reporter) -> Iterator[None]:
    """While active for longer than `seconds`, this rank reports it and exits."""

    def end() -> None:
        reporter.send("late", name=name)
        os._exit(1)

    ranks.said(name)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def made_and_weighed(make: Callable[[], Any], batches: Any) -> tuple[Any, int | None]:
    """Makes a variant, runs some steps, and returns its peak bytes in a step."""
    before = kept_bytes()
    variant = make()
    for batch in batches:  # state, buckets, and what is captured
        variant.run([batch])
    if not hasattr(variant, "optimizer") or not has_mallinfo():
        return variant, None
    kept = kept_bytes() - before + bucket_bytes(variant.trained)
    dist.barrier()
    return variant, kept + rise(lambda: variant.run(batches))


def sent_bytes() -> int:
    """The bytes that this host has sent over its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "link0":
            return int(counts.split()[8])
    return 0


def turns(task: Figures, reporter: Reporter) -> Figures:
    """Runs all turns; returns seconds per step, bytes sent, memory, and parameter differences to
    DDP."""
    begin = time.monotonic()
    makers = {COMPUTE: lambda: Training(task)} if task["compute_only"] else variants(task)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def given() -> tuple[Tensor, Tensor]:
        return drawn_batch(task["model"], generator, task["batch"])

    made: dict[str, Any] = {}
    peak: dict[str, int] = {}
    batches = [given() for _ in range(MEASURED_STEPS)]
    for name, make in makers.items():
        with limited(name, 2 * task["limit"], reporter):
            dist.barrier()
            made[name], weight = made_and_weighed(make, batches)
        peak |= {} if weight is None else {name: weight}
    link = AdjustedLink(task) if task["bits_per_second"] else None
    sent: dict[str, list[float]] = {name: [] for name in made}

    def seconds(name: str, batches: Any) -> float:
        before = sent_bytes()
        with limited(name, task["limit"], reporter):
            taken = timed(made[name], batches)
        sent[name].append((sent_bytes() - before) / len(batches))
        if len(sent[name]) > WARM_UP_STEPS and link is not None:
            link.after(name, taken)
        return taken

    def enough() -> bool:
        over = torch.tensor(float(time.monotonic() - begin > 60 * task["minutes"]))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over)

    first = 0 if link is None else 1
    found = ranks.in_turns(list(made), seconds, given, task["rounds"], task["turn"], first, enough)
    result: Figures = {"seconds": found, "sent": {k: median(v) for k, v in sent.items()}}
    result["rates"] = None if link is None else link.rates
    if not task["compute_only"]:
        ranks.said("differences")
        result["peak"] = peak
        result["state"] = {n: state_bytes(v) for n, v in made.items() if hasattr(v, "optimizer")}
        result["differences"] = differences(made)
    return result


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def state_bytes(variant: Any) -> tuple[int, int]:
    """The bytes of parameters and of optimizer state that a rank holds."""
    optimizer = getattr(variant.optimizer, "optim", variant.optimizer)
    states = [v for state in optimizer.state.values() for v in state.values()]
    return (
        sum(local(p).nbytes for p in variant.model.parameters()),
        sum(local(v).nbytes for v in states if isinstance(v, Tensor)),
    )


@record
def work(task: Figures, folder: Path) -> None:
    """Runs the task of one emulated host."""
    reporter = Reporter(folder)
    with ranks.process_group(folder, reporter):
        reporter.send("turns", **turns(task, reporter))


def completed(task: Figures, count: int, rate: float | None) -> list[Event]:
    """Runs the task on all ranks; variants that time out are dropped, and the rest starts again."""
    while True:
        late: list[str] = []
        try:
            return ranks.run_work(__file__, task, count, rate, late=late)
        except RankFailedError:
            if not late:
                raise
        Console().print(f"left out, since a turn took too long: {late[0]}")
        task["left_out"] = [*task["left_out"], late[0]]


def measure(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures one row of figures for each model and ratio."""
    for model in options.models:
        names = ["sweep", "rounds", "turn", "batch", "variants", "minutes", "limit"]
        task = {"model": model, "form": "plain"} | {n: getattr(options, n) for n in names}
        task |= {"compute_only": False, "ratio": 0.0, "bits_per_second": None, "left_out": []}
        few = task | {"compute_only": True, "rounds": 3}
        alone = min(slowest(ranks.run_work(__file__, few, options.ranks))[COMPUTE])
        for ratio in options.ratios:
            rate = link_rate(link_bits(model, options.ranks), alone, ratio)
            shaped = task | {"ratio": ratio, "bits_per_second": rate}
            yield figures(shaped, completed(shaped, options.ranks, rate))


def figures(task: Figures, results: list[Event]) -> Figures:
    """The medians, and the ratios to the best of each kind in each round."""
    seconds = slowest(results)

    def best(kind: str) -> str | None:
        found = [name for name in seconds if name.startswith(kind)]
        return min(found, key=lambda name: median(seconds[name]), default=None)

    def per(other: str | None) -> Figures:
        if other is None:
            return {}
        return {name: spread(paired(times, seconds[other])) for name, times in seconds.items()}

    found = {
        "model": task["model"],
        "ratio": task["ratio"],
        "rates": results[0]["rates"],
        "seconds": seconds,
        "best": {kind: best(kind) for kind in ("DDP,", OPTIMIZER, PLAIN, TUNED)},
    }
    found["per"] = {kind: per(name) for kind, name in found["best"].items()}
    for key in ("sent", "state", "differences"):
        found[key] = results[0][key]
    peaks = [result["peak"] for result in results]
    found["peak"] = {name: max(peak[name] for peak in peaks) for name in peaks[0]}
    return found


def table(row: Figures) -> Table:
    """The table of figures."""
    rate = median(row["rates"]) / 1e6
    made = Table(title=f"{row['model']}, ratio {row['ratio']:g}, link {rate:.0f} Mbit/s")
    columns = ("", "ms", "/ DDP", "/ DDP+ZeRO", "/ FSDP2", "/ tuned", "MB sent", "peak MB")
    columns += ("/ FSDP2", "kept MB")
    for column in (*columns, "differs"):
        made.add_column(column, justify="left" if not column else "right")
    for name, times in row["seconds"].items():
        ratios = [row["per"][kind].get(name) for kind in ("DDP,", OPTIMIZER, PLAIN, TUNED)]
        parameters, state = row["state"].get(name, (0, 0))
        peak = row["peak"].get(name)
        most = min((row["peak"][n] for n in (PLAIN, TUNED) if n in row["peak"]), default=None)
        made.add_row(
            name,
            f"{1e3 * median(times):.0f}",
            *("" if r is None else f"{r['median']:.2f}" for r in ratios),
            f"{row['sent'][name] / 1e6:.2f}",
            "" if peak is None else f"{peak / 1e6:.1f}",
            "" if peak is None or most is None else f"{peak / most:.2f}",
            f"{parameters / 1e6:.1f} + {state / 1e6:.1f}" if state else "",
            f"{row['differences'].get(name, 0):.1g}",
        )
    return made


def parse() -> argparse.Namespace:
    """Parses the command line options."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="emulated hosts")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0])
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="N times the batch")
    parser.add_argument("--sweep", nargs="+", type=float, default=[0.5, 1, 2, 25], help="MB")
    parser.add_argument("--turn", type=int, default=6, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns, at least 2")
    parser.add_argument("--variants", nargs="*", default=[], help="parts of names; all")
    parser.add_argument("--minutes", type=float, default=5, help="after which rounds end")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a turn may take")
    given = parser.parse_args()
    names = variants({"sweep": given.sweep, "variants": [], "left_out": []})
    for part in given.variants:
        if not any(part in name for name in names):
            parser.error(f"{part!r} is in no variant's name: {'; '.join(names)}")
    return given


def main() -> None:
    """Measures, prints tables and writes a file."""
    options = parse()
    if ranks.works(options, work):
        return
    ranks.tabulate(options, measure(options), table)


if __name__ == "__main__":
    main()
