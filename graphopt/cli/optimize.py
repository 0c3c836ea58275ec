"""Declares `graphopt optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.options import GraphFile, Imports, Verify, not_empty

EXAMPLES = """
Examples:

    graphopt optimize step.pt --pipeline default --out optimized.pt

    graphopt optimize step.pt --pipeline "comm_fusion_with_concat(bucket_size_mb=5)" --dump dumps

    graphopt optimize graphopt-repro/01.pt --pipeline schedule_comm_wait

    graphopt optimize step.pt --import my_passes.py --pipeline my_pass

A graph is saved by `graphopt.saved.save_graph(train_step.graph_module, "step.pt")`.
"""


def optimize(
    file: GraphFile,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Passes to apply: `name(option=value) -> name`, `default` or `none`.",
            callback=not_empty,
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="In place of passes, stages of the compiler: `lower -> finalize`.",
            callback=not_empty,
        ),
    ] = None,
    modules: Imports = None,
    out: Annotated[Path | None, typer.Option(help="Save the resulting graph here.")] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write the graph and its changes after each pass here.")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option(help="Leave out a pass of this name. May be repeated.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=0, help="Stop after so many passes.")
    ] = None,
    verify: Annotated[Verify | None, typer.Option(help="How much of each pass is checked.")] = None,
) -> None:
    """Apply passes to a saved graph and print what each one did.

    The exit status is 1 when a pass fails or is refused, and 2 when the file or the pipeline cannot
    be used.
    """
    from graphopt.commands.optimize import run_optimize, run_stages

    level = None if verify is None else verify.value
    if (pipeline is None) == (stages is None):
        raise typer.BadParameter("give either --pipeline or --stages")
    if stages is not None:
        run_stages(file, stages, out=out, dump=dump, verify=level)
        return
    assert pipeline is not None
    run_optimize(
        file,
        pipeline,
        modules=modules or [],
        out=out,
        dump=dump,
        disable=disable or [],
        stop_after=stop_after,
        verify=level,
    )
