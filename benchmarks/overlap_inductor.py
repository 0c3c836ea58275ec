"""Sharded steps of a large model: this repository's scheduler beside Inductor's, simulated.

    python benchmarks/overlap_inductor.py
    python benchmarks/overlap_inductor.py --layers 8 --steps "Llama, 64" "Llama, 1 by 8"

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from spread import Figures
from torch import fx
from torch._C._distributed_c10d import _register_process_group
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

import graphopt
from graphopt.cost import DEVICES, NETWORKS, Collective, CostModel, Transfer
from graphopt.cost.roofline import RooflineCost
from graphopt.graph_utils import is_collective
from graphopt.schedule import Timeline, apply_schedule, overlap_schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from llama_steps import Llama, llama_step
from sharded import Sizes, sharded_step
from sketch import one_rank

LARGE = {"width": 4096, "hidden": 14336, "heads": 32, "tokens": 8192}
SHORT = {**LARGE, "tokens": 2048}
STEPS: dict[str, Callable[[int], Sizes | Llama]] = {
    "sharded over 64": lambda n: Sizes(n, fsdp=64, **LARGE),
    "8 by 8, tensor parallel": lambda n: Sizes(n, fsdp=8, tp=8, **LARGE),
    "tensor parallel over 8": lambda n: Sizes(n, fsdp=1, tp=8, **LARGE),
    "64 by 8, 2048 tokens": lambda n: Sizes(n, fsdp=64, tp=8, **SHORT),
    "sharded over 512, 2048 tokens": lambda n: Sizes(n, fsdp=512, **SHORT),
    "Llama, 64": lambda n: Llama(n, fsdp=64, tokens=16384, updates=False),
    "Llama, 64, with updates": lambda n: Llama(n, fsdp=64),
    "Llama, 64, recomputed": lambda n: Llama(n, fsdp=64, recompute=True, updates=False),
    "Llama, 64, by layers": lambda n: Llama(n, fsdp=64, whole_layers=True),
    "Llama, 64, by layers, one ahead": lambda n: Llama(
        n, fsdp=64, whole_layers=True, ahead=1, updates=False
    ),
    "Llama, 1 by 8": lambda n: Llama(n, tp=8, tokens=16384, updates=False),
    "Llama, 1 by 8, recomputed": lambda n: Llama(
        n, tp=8, tokens=16384, recompute=True, updates=False
    ),
    "Llama, 32 by 8": lambda n: Llama(n, fsdp=32, tp=8, tokens=32768, updates=False),
    "Llama, 32 by 8, 4096 tokens": lambda n: Llama(n, fsdp=32, tp=8, tokens=4096, updates=False),
    "Llama, 32 by 8, by layers, recomputed": lambda n: Llama(
        n, fsdp=32, tp=8, tokens=16384, whole_layers=True, recompute=True
    ),
}
"""By name, a model of so many layers."""
MS = 1e3


def two_networks(collective: Collective) -> Transfer:
    """The group "tp" in a machine, "fsdp" between machines; a launch takes nothing of compute."""
    name = "nvlink" if collective.group == "tp" else "infiniband"
    return NETWORKS[name](collective)._replace(links=(name,), overhead=0.0)


def ranks_known(sizes: Sizes | Llama) -> Callable[[Collective], Transfer]:
    """`two_networks`, with the number of ranks that a group has."""
    of_group = {"fsdp": sizes.fsdp, "tp": sizes.tp}
    return lambda collective: two_networks(collective._replace(ranks=of_group[collective.group]))


def ours(gm: fx.GraphModule, costs: CostModel) -> fx.GraphModule:
    """In place."""
    return _ordered(gm, costs, buckets=True)


def order_alone(gm: fx.GraphModule, costs: CostModel) -> fx.GraphModule:
    """As `ours`, with as many collectives as before."""
    return _ordered(gm, costs, buckets=False)


def _ordered(gm: fx.GraphModule, costs: CostModel, *, buckets: bool) -> fx.GraphModule:
    schedule = overlap_schedule(gm.graph, costs, buckets=buckets)
    if schedule is not None:
        apply_schedule(gm.graph, schedule)
    return gm


def inductors(gm: fx.GraphModule, costs: CostModel) -> fx.GraphModule:
    """With the same costs, as an order alone: no collectives are put together."""

    def estimated(node: fx.Node, size: int | None) -> float | None:
        seconds = (
            costs.transfer(node).seconds if is_collective(node) else costs.compute_seconds(node)
        )
        return MS * seconds

    device = DEVICES["h100"]  # asked for beside the costs that are given, also without a GPU
    rates = {
        "get_gpu_dram_gbps": lambda: device.bytes_per_second / 1e9,
        "get_device_tflops": lambda dtype: device.flops_of(dtype) / 1e12,
    }
    with patch.multiple("torch.utils._runtime_estimation", **rates):
        return schedule_overlap_bucketing(
            gm,
            collective_bucketing=False,
            pre_bucketing_fsdp_collectives=False,
            custom_runtime_estimation=estimated,
            compute_estimator="analytical",
        )


def figures(name: str, layers: int) -> list[Figures]:
    """One row for each order of one step."""
    sizes = STEPS[name](layers)
    step = sharded_step(sizes) if isinstance(sizes, Sizes) else llama_step(sizes)
    costs = CostModel(RooflineCost(DEVICES["h100"]), ranks_known(sizes))
    given = graphopt.simulate(step, costs)
    bound = given.preemptive_bound_seconds
    rows = [_row(name, "as it is", 0.0, given, bound)]
    for label, schedule in (
        ("graphopt", ours),
        ("order alone", order_alone),
        ("Inductor", inductors),
    ):
        gm = copy.deepcopy(step)
        start = time.process_time()
        try:
            done = schedule(gm, costs)
        except Exception as error:  # of the other library: the row says so
            rows.append({"step": name, "order": label, "error": f"{type(error).__name__}: {error}"})
            continue
        taken = time.process_time() - start
        rows.append(_row(name, label, taken, graphopt.simulate(done, costs), bound))
    return rows


def _row(name: str, order: str, seconds: float, found: Timeline, bound: float) -> Figures:
    return {
        "step": name,
        "order": order,
        "nodes": len(found.program.order),
        "collectives": len(found.program.messages),
        "milliseconds": MS * found.step_seconds,
        "per_bound": found.step_seconds / bound,
        "peak_gb": found.peak_bytes / 1e9,
        "cpu_seconds": seconds,
        "exposed_by_cause": exposed_by_cause(found),
    }


def exposed_by_cause(found: Timeline) -> dict[str, float]:
    """Milliseconds that compute stands still, by what it waits for: collectives of a kind and a
    group; queued, where these waited for others before them; at the end, where nothing is left to
    compute."""
    causes: dict[str, float] = {}
    last = max((slot.end for slot in found.compute), default=found.begin)
    for slot in found.collectives:
        kind = slot.message.kind.partition("_tensor")[0].partition("_into")[0]
        when = " at the end" if slot.end >= last else ""
        queued = " queued" if slot.start > slot.launched else ""
        cause = f"{slot.message.group} {kind}{queued}{when}"
        causes[cause] = causes.get(cause, 0.0) + MS * slot.exposed
    return {cause: exposed for cause, exposed in causes.items() if exposed}


def table(rows: list[Figures]) -> Table:
    """All steps and orders."""
    made = Table(title="sharded steps, simulated on H100s")
    for heading in (
        *("step", "order", "nodes", "collectives", "ms", "/ bound", "peak, GB", "CPU, s"),
        "ms exposed, most first",
    ):
        made.add_column(heading)
    for row in rows:
        if "error" in row:
            made.add_row(row["step"], row["order"], row["error"].splitlines()[0][:60])
            continue
        made.add_row(
            row["step"],
            row["order"],
            str(row["nodes"]),
            str(row["collectives"]),
            f"{row['milliseconds']:.1f}",
            f"{row['per_bound']:.3f}",
            f"{row['peak_gb']:.2f}",
            f"{row['cpu_seconds']:.1f}",
            _most(row["exposed_by_cause"]),
        )
    return made


def _most(causes: dict[str, float]) -> str:
    found = sorted(causes.items(), key=lambda cause: -cause[1])[:3]
    return ", ".join(f"{name} {exposed:.1f}" for name, exposed in found)


def main() -> None:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="of the model")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    options = parser.parse_args()
    with one_rank():
        for name in ("fsdp", "tp"):  # Inductor asks for them; how many ranks they have is said
            _register_process_group(name, dist.group.WORLD)
        rows = [row for name in options.steps for row in figures(name, options.layers)]
    Console(width=180).print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
