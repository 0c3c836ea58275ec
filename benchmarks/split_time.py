"""How long `split_module` takes, and torch's, on graphs of a thousand to a hundred thousand nodes.

    python benchmarks/split_time.py
    python benchmarks/split_time.py --nodes 1000 10000 --partitions 8 --repeats 20

Each graph is a stack of small blocks (a matrix product, a bias, GELU, a skip connection), cut into
partitions of equal size. Both split the same graph in the same process, one after the other, with
either first in turn; their ratio is taken pair by pair. Shown are medians and quartiles, and what a
node costs: where that stays the same, the time grows linearly.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spread import Figures, show_spread, spread
from torch import fx
from torch.fx.passes.split_module import split_module as torch_split_module

from graphopt.partition import split_module

NODES = [1_000, 10_000, 100_000]
REPEATS = {1_000: 40, 10_000: 15, 100_000: 7}
"""How often each is timed, where the command line does not say."""

aten = torch.ops.aten


def stack_of_blocks(nodes: int) -> fx.GraphModule:
    """A graph of about `nodes` nodes, with `meta["val"]` as a captured graph has."""
    graph = fx.Graph()
    meta = torch.empty(4, 4, device="meta")
    value, weight, bias = (graph.placeholder(name) for name in ("x", "w", "b"))
    while len(graph.nodes) < nodes:
        product = graph.call_function(aten.mm.default, (value, weight))
        shifted = graph.call_function(aten.add.Tensor, (product, bias))
        active = graph.call_function(aten.gelu.default, (shifted,), {"approximate": "tanh"})
        value = graph.call_function(aten.add.Tensor, (active, value))
    graph.output(value)
    for node in graph.nodes:
        node.meta["val"] = meta
    return fx.GraphModule({}, graph)


def measure(nodes: int, partitions: int, repeats: int) -> dict[str, Any]:
    """Seconds of both for one size, and their ratio."""
    module = stack_of_blocks(nodes)
    count = len(module.graph.nodes)
    number = {node: index * partitions // count for index, node in enumerate(module.graph.nodes)}
    ways = {"graphopt": split_module, "torch": torch_split_module}
    for split in ways.values():
        split(module, module, number.__getitem__)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            seconds[name].append(timed(ways[name], module, number))
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    return {
        "nodes": count,
        "partitions": partitions,
        "repeats": repeats,
        **{name: spread(values) for name, values in seconds.items()},
        "ratio": spread(ratios),
    }


def timed(
    split: Callable[..., fx.GraphModule], module: fx.GraphModule, number: dict[fx.Node, int]
) -> float:
    """Seconds of one split; what the last one left is collected before."""
    gc.collect()
    start = time.perf_counter()
    split(module, module, number.__getitem__)
    return time.perf_counter() - start


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table("", *(f"{r['nodes']} nodes" for r in results))
    for name in ("graphopt", "torch"):
        table.add_row(f"{name}, s", *(show_spread(r[name], r["repeats"]) for r in results))
        table.add_row(f"{name}, µs per node", *(f"{per_node(r, r[name]):.0f}" for r in results))
    table.add_row("ratio", *(show_spread(r["ratio"], r["repeats"]) for r in results))
    return table


def per_node(result: dict[str, Any], found: Figures) -> float:
    return float(1e6 * found["median"] / result["nodes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--partitions", type=int, default=64)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    results = []
    for nodes in options.nodes:
        with console.status(f"{nodes} nodes"):
            repeats = options.repeats or REPEATS.get(nodes, 10)
            results.append(measure(nodes, options.partitions, repeats))
    console.print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
