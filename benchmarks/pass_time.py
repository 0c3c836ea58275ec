"""How long the default pipeline takes on graphs of a thousand to a hundred thousand nodes.

    python benchmarks/pass_time.py
    python benchmarks/pass_time.py --nodes 1000 10000 --optimizer adamw-foreach
    python benchmarks/pass_time.py --graphs step.pt --repeat 3
    python benchmarks/pass_time.py --nodes 36000 --ranks 65536

GPTs of more and more layers are captured with the communication of two ranks, or of as many as
asked for, and the passes run one after another. Shown are seconds per pass and of all, CPU seconds
of the whole pipeline at each level of verification (the least of `--repeat` runs), those of the
proof alone, and what a node costs: where that stays the same, the time grows linearly. With each
goes the derivation of the graphs that run: the proof of late work speaks of them, and they are not
derived again behind it. Nothing is communicated, so one process is enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from step_models import GPT_ALPHABET, OPTIMIZERS, train_step
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.executable import finalize
from graphopt.iter_graph import IterGraphModule
from graphopt.saved import load_graph
from graphopt.stages import default_pipeline

NODES = [1_000, 10_000, 36_000, 100_000]
LEVELS = ("off", "dependencies", "equivalence")
WIDTH, HEADS, LENGTH = 64, 4, 32


def captured_gpt(layers: int, optimizer: str) -> tuple[torch.fx.GraphModule, float]:
    """The graph of the steady step of a GPT of `layers` layers, and the seconds it took."""
    size = GPTSize(GPT_ALPHABET, length=LENGTH, width=WIDTH, heads=HEADS, layers=layers)
    kind, options = OPTIMIZERS[optimizer]
    model = CharGPT(size)
    trained = kind(model.parameters(), **options)
    numbers = torch.zeros(2, LENGTH, dtype=torch.int64)
    train_step(model, trained, numbers, numbers)
    start = time.perf_counter()
    captured = graphopt.capture(
        train_step, model, trained, numbers, numbers, parallel=graphopt.DataParallel()
    )
    return captured.graph_module, time.perf_counter() - start


def layers_for(nodes: int, optimizer: str) -> int:
    """How many layers make a graph of about `nodes` nodes."""
    few, more = (len(captured_gpt(n, optimizer)[0].graph.nodes) for n in (1, 3))
    per_layer = (more - few) / 2
    return max(1, round((nodes - few) / per_layer + 1))


def measure_capture(nodes: int, optimizer: str, repeat: int) -> dict[str, Any]:
    """Seconds of everything before the first run, for one size."""
    layers = layers_for(nodes, optimizer)
    graph_module, seconds = captured_gpt(layers, optimizer)
    found = measure(graph_module, repeat)
    return {**found, "seconds": {"capture": seconds, **found["seconds"]}}


def measure(graph_module: torch.fx.GraphModule, repeat: int) -> dict[str, Any]:
    """Seconds of everything between capture and the first run."""
    found: dict[str, Any] = {"nodes": len(graph_module.graph.nodes), "seconds": {}}
    for verify in LEVELS:
        runs = [run(graph_module, verify) for _ in range(repeat)]
        total, module, records = min(runs, key=itemgetter(0))
        if verify == "off":
            found["seconds"].update({record.name: record.seconds for record in records})
            found["seconds"]["all passes"] = sum(record.seconds for record in records)
        found["seconds"][f"pipeline, verify={verify!r}, CPU"] = total
    passes, _, proven = (found["seconds"][f"pipeline, verify={v!r}, CPU"] for v in LEVELS)
    found["seconds"]["proof, CPU"] = proven - passes
    found["proof / passes"] = (proven - passes) / passes
    module.finalize_setup(finalize)
    start = time.perf_counter()
    module.prepare()
    found["seconds"]["finalize"] = time.perf_counter() - start
    found["collectives"] = [records[0].collectives_before, records[-1].collectives_after]
    return found


def run(
    graph_module: torch.fx.GraphModule, verify: str
) -> tuple[float, IterGraphModule, list[graphopt.PassRecord]]:
    """CPU seconds of the default pipeline and of deriving what runs, what the pipeline leaves, and
    the records of its passes."""
    module = IterGraphModule(graph_module)
    manager = graphopt.PassManager(default_pipeline(), verify=verify)
    gc.collect()
    start = time.process_time()
    records = manager.run(module)
    module.derive()
    return time.process_time() - start, module, records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--graphs", type=Path, nargs="+", help="saved ones, none is captured")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--ranks", type=int, default=2, help="of the step; this process is one")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("graphopt").setLevel(logging.WARNING)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    console = Console()
    results = []
    for path in options.graphs or ():
        results.append(measure(load_graph(path), options.repeat))
    for nodes in () if options.graphs else options.nodes:
        with console.status(f"about {nodes} nodes"):
            results.append(measure_capture(nodes, options.optimizer, options.repeat))
    console.print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def table_of(results: list[dict[str, Any]]) -> Table:
    """Seconds, and microseconds per node, by size."""
    table = Table("seconds (µs per node)", *(f"{r['nodes']} nodes" for r in results))
    for row in results[0]["seconds"]:
        cells = []
        for result in results:
            seconds = result["seconds"][row]
            cells.append(f"{seconds:.2f} ({1e6 * seconds / result['nodes']:.0f})")
        table.add_row(row, *cells)
    table.add_row("proof / passes", *(f"{r['proof / passes']:.2f}" for r in results))
    table.add_row(
        "collectives before → after", *("{} → {}".format(*r["collectives"]) for r in results)
    )
    return table


if __name__ == "__main__":
    main()
