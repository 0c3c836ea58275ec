"""Benchmark of sharded training on slow links: ZeRO-1 and ZeRO-3, DDP with and without its sharded
optimizer, FSDP2.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --models stack gpt --ratios 0.5 1 2 --rounds 6 --json sharded.json

Each model trains in turns in one run, on emulated hosts whose link is set so that one all-reduce of
all gradients takes `ratio` times the compute of a step. Ratios are of turns of one round; bytes are
what a host sends, by the kernel's count. Peak memory is what a training keeps
(parameters, state, buckets) and what its steps allocate beside that, at most; both are measured
before the turns, when no other variant runs.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import ranks
import torch.distributed as dist
from overlap import (
    COMMUNICATION,
    COMPUTE,
    AdjustedLink,
    Communication,
    Training,
    batches_of,
    differences,
    link_name,
    measure,
    parser_of,
    take_turns,
)
from ranks import paired, slowest
from rich.table import Table
from sharded_variants import PLAIN, TUNED, FullySharded, Sharded, ZeroOptimizer
from spread import Figures, spread
from step_memory import bucket_bytes, has_mallinfo, kept_bytes, rise
from torch import Tensor

Makers = dict[str, Callable[[], Any]]

OPTIMIZER = "DDP + ZeroRedundancyOptimizer"

MEASURED_STEPS = 4
"""Of each variant, for its memory."""


def variants(task: Figures) -> Makers:
    """All variants that take turns, by name."""
    sizes = {f"DDP, {size:g} MB": size for size in task["sweep"]}
    return {
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


def turns(task: Figures) -> Figures:
    """Runs all turns; returns what they took, memory, and parameter differences to DDP."""
    link = AdjustedLink(task) if task["bits_per_second"] else None
    if task["compute_only"]:
        return take_turns(task, {COMPUTE: Training(task)}, link)
    made: dict[str, Any] = {}
    peak: dict[str, int] = {}
    given = batches_of(task)
    batches = [given() for _ in range(MEASURED_STEPS)]
    for name, make in variants(task).items():
        dist.barrier()
        made[name], weight = made_and_weighed(make, batches)
        peak |= {} if weight is None else {name: weight}
    result = take_turns(task, made, link) | {"peak": peak, "differences": differences(made)}
    result["state"] = {n: state_bytes(v) for n, v in made.items() if hasattr(v, "optimizer")}
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


def figures(task: Figures, results: list[Figures]) -> Figures:
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
    link = link_name(row["rates"] and median(row["rates"]))
    made = Table(title=f"{row['model']}, ratio {row['ratio']:g}, {link}")
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


def main() -> None:
    """Measures, prints tables and writes a file."""
    parser = parser_of(__doc__)
    parser.set_defaults(models=["gpt"], sweep=[0.5, 1, 2, 25], turn=6, rounds=6)
    options = parser.parse_args()
    if not ranks.works(options, turns):
        ranks.tabulate(options, measure(__file__, options, figures), table)


if __name__ == "__main__":
    main()
