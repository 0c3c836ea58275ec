"""Benchmark of sharded training on slow links: ZeRO-1 and ZeRO-3, DDP with and without its sharded
optimizer, FSDP2.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --models stack gpt --ratios 0.5 1 2 --rounds 6 --json sharded.json

Each model trains in turns in one run, on emulated hosts whose link is set so that one all-reduce of
all gradients takes `ratio` times the compute of a step. Ratios are of turns of one round; bytes are
what a host sends, by the kernel's count, headers included. Peak memory is what a training keeps
(parameters, state, buckets) and what its steps allocate beside that, at most; both are measured
before the turns, when no other variant runs.

Where a rank dies, the variants that it has run last are shown. `--variants` leaves out others.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import figures
import ranks
import torch.distributed as dist
from figures import Figures, spread
from overlap import (
    COMMUNICATION,
    COMPUTE,
    Communication,
    Training,
    batches_of,
    link_of,
    measure,
    parser_of,
    take_turns,
)
from ranks import paired, slowest
from rich.table import Table
from sharded_variants import PLAIN, TUNED, FullySharded, ZeroOptimizer
from step_memory import bucket_bytes, has_mallinfo, kept_bytes, rise
from torch import Tensor

import graphopt

Makers = dict[str, Callable[[], Any]]

OPTIMIZER = "DDP + ZeroRedundancyOptimizer"

MEASURED_STEPS = 4
"""Of each variant, for its memory."""


def variants(task: Figures) -> Makers:
    """All variants that take turns, by name."""

    def zero(**options: Any) -> Callable[[], Training]:
        return lambda: Training(task, parallel=graphopt.ZeRO(**options))

    makers: Makers = {COMPUTE: lambda: Training(task), COMMUNICATION: lambda: Communication(task)}
    for size in task["sweep"]:
        makers[f"DDP, {size:g} MB"] = lambda mb=size: Training(task, buckets_mb=mb)
    for size in task["sweep"][:2]:
        makers[f"{OPTIMIZER}, {size:g} MB"] = lambda mb=size: ZeroOptimizer(task, mb)
    makers |= {
        PLAIN: lambda: FullySharded(task),
        TUNED: lambda: FullySharded(task, tuned=True),
        f"{TUNED}, kept": lambda: FullySharded(task, tuned=True, reshard=False),
        "graphopt, stage 1": zero(stage=1),
        "graphopt, stage 3": zero(stage=3),
        "graphopt, stage 3, kept": zero(stage=3, keep_mb=1e6),
    }
    chosen = (COMPUTE, COMMUNICATION, *task["variants"]) if task["variants"] else ("",)
    return {name: make for name, make in makers.items() if any(part in name for part in chosen)}


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
    """Runs all turns; returns what `take_turns` does, and bytes of memory."""
    if task["alone"]:
        return take_turns(task, {COMPUTE: Training(task)})
    made: dict[str, Any] = {}
    peak: dict[str, int] = {}
    given = batches_of(task)
    batches = [given() for _ in range(MEASURED_STEPS)]
    for name, make in variants(task).items():
        dist.barrier()
        print(name, flush=True)
        made[name], weight = made_and_weighed(make, batches)
        peak |= {} if weight is None else {name: weight}
    state = {n: state_bytes(v) for n, v in made.items() if hasattr(v, "optimizer")}
    return take_turns(task, made) | {"peak": peak, "state": state}


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


def row_of(task: Figures, results: list[Figures]) -> Figures:
    """The medians, and the ratios to the best of each kind in each round."""
    seconds = slowest(results)

    def best(kind: str) -> str | None:
        found = [name for name in seconds if name.startswith(kind)]
        return min(found, key=lambda name: median(seconds[name]), default=None)

    def per(other: str | None) -> Figures:
        if other is None:
            return {}
        return {name: spread(paired(times, seconds[other])) for name, times in seconds.items()}

    kinds = {kind: best(kind) for kind in ("DDP,", OPTIMIZER, PLAIN, TUNED)}
    peaks = [result["peak"] for result in results]
    return {
        **{key: task[key] for key in ("model", "ratio")},
        **{key: results[0][key] for key in ("rates", "sent", "state", "differences")},
        "seconds": seconds,
        "best": kinds,
        "per": {kind: per(name) for kind, name in kinds.items()},
        "peak": {name: max(peak[name] for peak in peaks) for name in peaks[0]},
    }


def table(row: Figures) -> Table:
    """The table of figures."""
    kinds = {"DDP": "DDP,", "DDP+ZeRO": OPTIMIZER, "FSDP2": PLAIN, "tuned": TUNED}
    least = min((row["peak"][n] for n in (PLAIN, TUNED) if n in row["peak"]), default=None)
    rows = []
    for name, times in row["seconds"].items():
        ratios = {title: row["per"][kind].get(name) for title, kind in kinds.items()}
        parameters, state = row["state"].get(name, (0, 0))
        peak = row["peak"].get(name)
        rows.append(
            {
                "": name,
                "ms": f"{1e3 * median(times):.0f}",
                **{f"/ {t}": "" if r is None else r["median"] for t, r in ratios.items()},
                "MB sent": row["sent"][name] / 1e6,
                "peak MB": "" if peak is None else f"{peak / 1e6:.1f}",
                "peak / FSDP2's": "" if None in (peak, least) else peak / least,
                "kept MB": f"{parameters / 1e6:.1f} + {state / 1e6:.1f}" if state else "",
                "differs": f"{row['differences'].get(name, 0):.1g}",
            }
        )
    title = f"{row['model']}, ratio {row['ratio']:g}, {link_of(row)}"
    return figures.table(rows, title=title)


def main() -> None:
    """Measures, prints tables and writes a file."""
    parser = parser_of(__doc__)
    parser.set_defaults(forms=["plain"], models=["gpt"], sweep=[0.5, 1, 2, 25], turn=6, rounds=6)
    parser.add_argument("--variants", nargs="*", default=[], help="parts of names; all")
    options = parser.parse_args()
    names = variants({"sweep": options.sweep, "variants": []})
    for part in options.variants:
        if not any(part in name for name in names):
            parser.error(f"{part!r} is in no variant's name: {'; '.join(names)}")
    if not ranks.works(options, turns):
        figures.tabulate(options, measure(__file__, options, row_of), table)


if __name__ == "__main__":
    main()
