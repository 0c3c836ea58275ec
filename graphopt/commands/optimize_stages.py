"""Implementation of `graphopt optimize --stages`, which runs the stages behind the passes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.commands.errors import FAILED, reported
from graphopt.manager import PassManager, records_of
from graphopt.readable import graph_text
from graphopt.saved import load_graph, save_graph
from graphopt.stages.compiling import Stages


def run_stages(
    file: Path, text: str, *, out: Path | None, dump: Path | None, verify: str | None
) -> None:
    """Runs the named stages on the graph in `file`, and prints each one's record."""
    console = Console()
    with reported("optimize"):
        graph_module = load_graph(file)
        names = [name.strip() for name in text.split("->")]
        stages = Stages.named(PassManager([], verify=verify, dump_dir=dump), names)
    before = len(records_of(graph_module))
    with reported("optimize", FAILED):
        result = stages.run_named(graph_module, names)
    for record in records_of(graph_module)[before:]:
        console.print(str(record), markup=False, highlight=False, soft_wrap=True)
    summary = graph_text(result).partition("\n")[0]
    console.print(f"after:  {summary}", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        with reported("optimize"):
            save_graph(result, out)
        console.print(f"saved: {out}", markup=False, highlight=False, soft_wrap=True)
