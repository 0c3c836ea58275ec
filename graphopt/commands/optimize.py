"""Implementation of `graphopt optimize`, which applies passes to a saved graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch import fx

from graphopt.commands.errors import FAILED, reported
from graphopt.commands.fake_groups import groups_present
from graphopt.commands.imports import import_passes
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassManager, Report, applied_passes
from graphopt.readable import graph_text
from graphopt.saved import load_graph, save_graph
from graphopt.stages import manager_for


def run_optimize(
    file: Path,
    pipeline: str,
    *,
    modules: Sequence[str],
    out: Path | None,
    dump: Path | None,
    disable: Sequence[str],
    stop_after: int | None,
    verify: str | None,
) -> None:
    """Applies `pipeline` to the graph in `file`, prints each pass's record, and saves the result.

    As in `graphopt.compile`, the default pipeline works on an `IterGraphModule`, and makes one.
    """
    console = Console()
    with reported("optimize"):
        graph_module = load_graph(file)
        if pipeline == "default" and not isinstance(graph_module, IterGraphModule):
            graph_module = IterGraphModule(graph_module)
        import_passes(modules)
        manager = PassManager(
            manager_for(pipeline, None),
            verify=verify,
            dump_dir=dump,
            disable=disable,
            stop_after=stop_after,
        )
    before = _summary(graph_module)
    earlier = applied_passes(graph_module)
    if earlier:
        console.print(f"applied before: {' -> '.join(earlier)}", markup=False, soft_wrap=True)
    with reported("optimize", FAILED), groups_present(graph_module):
        records = manager.run(graph_module)
    if records:
        console.print(str(Report(records)), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"before: {before}\nafter:  {_summary(graph_module)}", highlight=False, soft_wrap=True
    )
    if out is not None:
        with reported("optimize"):
            save_graph(graph_module, out)
        console.print(f"saved: {out}", markup=False, highlight=False, soft_wrap=True)


def _summary(graph_module: fx.GraphModule) -> str:
    return graph_text(graph_module).partition("\n")[0]
