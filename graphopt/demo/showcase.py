"""The parts of the demo without ranks: a graph to read, and a wrong pass that is refused."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from pathlib import PurePath

import torch
from rich.console import Console
from rich.markup import escape
from torch import fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.demo import example
from graphopt.graph_utils import is_view, is_wait
from graphopt.ir.metadata import source_line
from graphopt.readable.rows import row_of, target_text

_SHOWN = 10
_COLUMN = 72


def show_graph_and_passes(console: Console) -> None:
    """Prints ten lines of a captured step, then a pass that is refused and its correction."""
    with graphopt.testing.fake_ranks(2):
        gm = captured_step()
        graphopt.PassManager("comm_fusion_with_concat").run(gm)
        console.print("[bold]A training step is one graph.[/bold] Around a bucket of gradients:\n")
        for line in bucket_lines(gm):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        gm = captured_step()
        console.print("\n[bold]A wrong pass is refused:[/bold]\n")
        _print_source(console, example.wait_at_the_end)
        console.print(escape(refusal(gm)), soft_wrap=True, highlight=False, style="red")
        console.print("\n[bold]Its correction is proven to compute the same:[/bold]\n")
        _print_source(console, example.wait_before_first_reader)
        (record,) = graphopt.PassManager([example.wait_before_first_reader]).run(gm)
        console.print(escape(str(record)), soft_wrap=True, highlight=False, style="green")


def captured_step() -> fx.GraphModule:
    """The example step captured for two ranks; each gradient has its own all-reduce."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(8, 64), torch.randn(8, 64)
    captured = graphopt.capture(
        example.train_step, model, optimizer, *batch, parallel=graphopt.DataParallel()
    )
    return captured.graph_module


def bucket_lines(gm: fx.GraphModule) -> Iterator[str]:
    """Ten rows of the graph around the first bucket: inputs, launch, wait and readers."""
    launch = get_all_comm_blocks(gm)[0].comm_node
    shown = set(_connected(launch))
    last = None
    for node in gm.graph.nodes:
        if node in shown:
            if last not in (None, node.prev):
                yield "     …"
            yield _line(node)
            last = node


def _connected(launch: fx.Node) -> Iterator[fx.Node]:
    """The nodes around a launch: some that it reads, and some that read it; no views."""
    yield launch
    for neighbours in (lambda node: node.all_input_nodes, lambda node: list(node.users)):
        near, left = [launch], _SHOWN // 2
        while near and left:
            following = [other for node in near for other in neighbours(node)]
            near = [node for node in dict.fromkeys(following) if node.op == "call_function"]
            shown = [node for node in near if is_wait(node) or not is_view(node)][:left]
            left -= len(shown)
            yield from shown


def _line(node: fx.Node) -> str:
    row = row_of(node, {})
    shape = row.shape if len(row.shape) < 12 else ""
    text = f"  {row.marks:<2} %{node.name} = {target_text(node).removesuffix('.default')}  {shape}"
    source = source_line(node)
    if source is None:
        return f"{text:<{_COLUMN}} # {row.place}"
    place = f"{PurePath(source.file).name}:{source.line}"
    written = linecache.getline(source.file, source.line).strip()
    return f"{text:<{_COLUMN}} # {place}: {written}"


def refusal(gm: fx.GraphModule) -> str:
    """The error by which the wrong pass is refused; the graph is unchanged."""
    try:
        graphopt.PassManager([example.wait_at_the_end]).run(gm)
    except graphopt.VerificationError as error:
        return str(error)
    raise AssertionError("the wrong pass of the demo was accepted")


def _print_source(console: Console, pass_: graphopt.Pass) -> None:
    for line in inspect.getsource(pass_.function).splitlines():
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
