"""Declares `graphopt bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.options import Imports, not_empty

EXAMPLES = """
Examples:

    graphopt bisect step.pt --pipeline "my_pass -> comm_fusion_with_concat" --import my_passes.py

    graphopt bisect step.pt --pipeline default --out before.pt

    graphopt bisect --pipeline default -- torchrun --nproc-per-node 2 train.py

The command behind `--` runs with GRAPHOPT_STOP_AFTER=n, and says by its exit status whether it is
as it should be. Its steps have to use the pipeline that is named.
"""


def bisect(
    pipeline: Annotated[
        str,
        typer.Option(
            help="The passes among which one is to blame: as of `optimize`.", callback=not_empty
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A graph saved by graphopt.saved.save_graph; or, behind `--`, a command.",
            metavar="FILE | -- COMMAND ...",
            show_default=False,
        ),
    ] = None,
    modules: Imports = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the graph before the pass to blame here.")
    ] = None,
) -> None:
    """Find the first pass after which a graph computes something else, or a command fails.

    A saved graph is compared with what passes make of it: no ranks, model or GPU are needed.

    The exit status is 0 also where a pass is found, 1 when a pass raises on the way, and 2 when the
    file or the pipeline cannot be used.
    """
    from graphopt.commands.bisect import run_bisect

    given = arguments or []
    is_graph = len(given) == 1 and given[0].endswith(".pt")
    run_bisect(
        pipeline,
        file=Path(given[0]) if is_graph else None,
        modules=modules or [],
        command=[] if is_graph else given,
        out=out,
    )
