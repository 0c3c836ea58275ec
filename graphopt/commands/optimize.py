"""Implementation of `graphopt optimize`, which applies passes or stages to a saved graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch import fx

from graphopt.commands.errors import FAILED, reported
from graphopt.commands.fake_groups import groups_present
from graphopt.commands.imports import import_passes
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassManager, Report, applied_passes, records_of
from graphopt.readable import graph_text
from graphopt.saved import load_graph, save_graph
from graphopt.stages import manager_for
from graphopt.stages.compiling import Stages


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
    console = Console(highlight=False)
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
        console.out(f"applied before: {' -> '.join(earlier)}")
    with reported("optimize", FAILED), groups_present(graph_module):
        records = manager.run(graph_module)
    if records:
        console.out(str(Report(records)))
    console.out(f"before: {before}\nafter:  {_summary(graph_module)}")
    _save(console, graph_module, out)


def run_stages(
    file: Path, text: str, *, out: Path | None, dump: Path | None, verify: str | None
) -> None:
    """Runs the named stages behind the passes on the graph in `file`, and prints their records."""
    console = Console(highlight=False)
    with reported("optimize"):
        graph_module = load_graph(file)
        names = [name.strip() for name in text.split("->")]
        stages = Stages.named(PassManager([], verify=verify, dump_dir=dump), names)
    before = len(records_of(graph_module))
    with reported("optimize", FAILED):
        result = stages.run_named(graph_module, names)
    for record in records_of(graph_module)[before:]:
        console.out(str(record))
    console.out(f"after:  {_summary(result)}")
    _save(console, result, out)


def _save(console: Console, graph_module: fx.GraphModule, out: Path | None) -> None:
    if out is not None:
        with reported("optimize"):
            save_graph(graph_module, out)
        console.out(f"saved: {out}")


def _summary(graph_module: fx.GraphModule) -> str:
    return graph_text(graph_module).partition("\n")[0]
