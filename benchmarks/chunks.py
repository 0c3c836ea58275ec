"""Would it help to send large gradients in chunks? Simulated, by what each collective costs.

    python benchmarks/chunks.py
    python benchmarks/chunks.py --model gpt --compute 0.2 --ratios 0.5 1 2

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from overlap_models import OVERLAP_MODELS, overlap_batch
from rich.console import Console
from rich.table import Table
from spread import Figures
from step_models import train_step
from torch import fx

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.cost import DEVICES, Collective, CostModel, Transfer
from graphopt.cost.roofline import RooflineCost
from graphopt.graph_utils import readers_through_views, written
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassManager
from graphopt.schedule import Message, Program, program_of, simulate_program
from graphopt.stages.pipelines import HELD_BACK, pipeline_with
from graphopt.testing import fake_ranks

c10d = torch.ops._c10d_functional
RANKS = 2
LATENCY = 5e-4
LARGE = 2**19
"""Bytes from which a gradient is sent in chunks."""

CHUNKS = ((2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (8, 5))
"""How many, and how many of these are sent as they come."""


@dataclass(frozen=True)
class Setting:
    """A step and a link: all compute takes `compute` seconds, all communication `ratio` times that,
    and each collective takes `overhead` seconds away from compute."""

    compute: float
    ratio: float
    overhead: float

    @property
    def bound(self) -> float:
        """The larger of compute and communication, in seconds."""
        return self.compute * max(1.0, self.ratio)

    def costs(self, graph: fx.Graph, nbytes: int) -> CostModel:
        """Of a graph that sends `nbytes`; the roofline says how operators compare."""
        roofline = RooflineCost(DEVICES["cpu"])
        scale = self.compute / sum(map(roofline, graph.nodes))
        rate = nbytes / (self.ratio * self.compute)
        latency = LATENCY if self.overhead else 0.0

        def sent(collective: Collective) -> Transfer:
            return Transfer(latency, collective.nbytes / rate, overhead=self.overhead)

        return CostModel(lambda node: scale * roofline(node), sent)


def captured(model_name: str) -> fx.GraphModule:
    """A step with an average of each gradient over two ranks."""
    torch.manual_seed(0)
    model = OVERLAP_MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = overlap_batch(model_name, torch.Generator().manual_seed(0))
    train_step(model, optimizer, *batch)  # makes the state of the optimizer
    with fake_ranks(RANKS):
        args = (train_step, model, optimizer, *batch)
        return graphopt.capture(*args, parallel=graphopt.DataParallel()).graph_module


def passed(gm: fx.GraphModule, buckets: int, held_back: float) -> IterGraphModule:
    """A copy after the default passes."""
    module = IterGraphModule(copy.deepcopy(gm))
    PassManager(pipeline_with(buckets, held_back), verify="off").run(module)
    return module


def in_chunks(program: Program, chunks: int, at_once: int) -> Program:
    """The same step with large gradients in chunks: `at_once` of each are launched where it was,
    the others behind all launches, those whose parameters are read first before the others."""
    graph = fx.Graph()
    parts = {m: list(_parts(graph, m, chunks)) for m in program.messages}
    order = _each_before_its_reader(program)
    position = {node: index for index, node in enumerate(order)}
    due = sorted(program.messages, key=lambda message: position[message.waits[0]])
    held = [part.launch for message in due for part in parts[message][at_once:]]
    last = program.messages[-1].launch
    changed: list[fx.Node] = []
    for node in order:
        if node in program.launched:
            changed += [part.launch for part in parts[program.launched[node]][:at_once]]
            changed += held if node is last else []
        elif node in program.waited:
            changed += [part.waits[0] for part in parts[program.waited[node]]]
        else:
            changed.append(node)
    seconds = {node: taken for node, taken in program.seconds.items() if node in position}
    messages = [part for message in program.messages for part in parts[message]]
    overheads = {part.launch: part.transfer.overhead for part in messages}
    waits = frozenset(part.waits[0] for part in messages if part.lag)
    return Program(changed, program.late | waits, seconds | overheads, messages)


def _parts(graph: fx.Graph, message: Message, chunks: int) -> Iterator[Message]:
    """Messages that take a share of the time each, with launches and waits of their own."""
    count = chunks if message.nbytes >= LARGE else 1
    transfer = message.transfer._replace(transfer=message.transfer.transfer / count)
    for _ in range(count):
        launch = graph.call_function(message.launch.target, message.launch.args[1:])
        wait = graph.call_function(c10d.wait_tensor.default)
        nbytes = message.nbytes // count
        yield replace(message, launch=launch, transfer=transfer, nbytes=nbytes, waits=(wait,))


def _each_before_its_reader(program: Program) -> list[fx.Node]:
    """The order of a program with each late wait, and what follows from it, before the first node
    that reads what it updates."""
    position = {node: index for index, node in enumerate(program.order)}
    moved: dict[fx.Node, list[fx.Node]] = {}
    for message in program.messages:
        nodes = _following(program, message)
        states = [state for node in nodes for state in written(node)]
        readers = [r for s in states for r in readers_through_views(s) if r not in program.late]
        if nodes and readers:
            moved.setdefault(min(readers, key=position.__getitem__), []).extend(nodes)
    late = {node for nodes in moved.values() for node in nodes}
    return [
        found
        for node in program.order
        if node not in late
        for found in (*sorted(moved.get(node, ()), key=position.__getitem__), node)
    ]


def _following(program: Program, message: Message) -> list[fx.Node]:
    """The late waits of a message and the late nodes that need them."""
    found = dict.fromkeys(wait for wait in message.waits if wait in program.late)
    for node in program.order if found else ():
        if node in program.late and not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return list(found)


def rows(gm: fx.GraphModule, buckets: int, settings: Sequence[Setting]) -> Iterator[Figures]:
    """Step over bound by setting: of whole gradients, some held back, and of chunks."""
    nbytes = sum(block.nbytes for block in get_all_comm_blocks(gm, "all_reduce"))

    def programs(module: IterGraphModule) -> list[Program]:
        all_costs = [setting.costs(gm.graph, nbytes) for setting in settings]
        return [program_of(module.graph, costs, RANKS) for costs in all_costs]

    whole = programs(passed(gm, buckets, HELD_BACK))
    steps = [simulate_program(program) for program in whole]
    yield _row("whole, as by default", whole, [step.step_seconds for step in steps], settings)
    bounds = [step.preemptive_bound_seconds for step in steps]
    yield _row("preemptive bound of these", whole, bounds, settings)
    plain = programs(passed(gm, buckets, 0.0))
    for chunks, at_once in CHUNKS:
        cut = [in_chunks(program, chunks, at_once) for program in plain]
        seconds = [simulate_program(program).step_seconds for program in cut]
        yield _row(f"{chunks} chunks, {at_once} at once", cut, seconds, settings)


def _row(
    name: str, programs: Sequence[Program], seconds: Sequence[float], settings: Sequence[Setting]
) -> Figures:
    per_bound = [taken / s.bound for taken, s in zip(seconds, settings, strict=True)]
    return {"plan": name, "collectives": len(programs[0].messages), "per_bound": per_bound}


def table(found: Sequence[Figures], settings: Sequence[Setting]) -> Table:
    """One row for each plan, one column for each setting."""
    made = Table(title="step / max(compute, communication), simulated")
    made.add_column("plan")
    made.add_column("collectives")
    for setting in settings:
        made.add_column(f"{setting.ratio:g}, {1e3 * setting.overhead:g} ms")
    for row in found:
        figures = [f"{value:.3f}" for value in row["per_bound"]]
        made.add_row(row["plan"], str(row["collectives"]), *figures)
    return made


def main() -> None:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=OVERLAP_MODELS, default="stack")
    parser.add_argument("--compute", type=float, default=0.35, help="seconds of a step")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument(
        "--overheads", type=float, nargs="+", default=[0.0, 5e-4, 1e-3], help="seconds"
    )
    parser.add_argument("--buckets", type=int, default=32, help="min_buckets of the default passes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    options = parser.parse_args()
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")  # ranks on hosts of their own
    settings = [Setting(options.compute, r, o) for r in options.ratios for o in options.overheads]
    found = list(rows(captured(options.model), options.buckets, settings))
    Console(width=160).print(table(found, settings))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
