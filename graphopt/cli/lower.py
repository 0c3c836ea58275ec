"""Declares `graphopt lower`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.options import GraphFile

EXAMPLES = """
Examples:

    graphopt lower step.pt --target cuda:90 --out kernels

    graphopt lower step.pt --target cuda:80 --min-ops 3 --out kernels

A graph is saved by `graphopt.saved.save_graph(train_step.graph_module, "step.pt")`.
"""


def lower(
    file: GraphFile,
    out: Annotated[
        Path,
        typer.Option(
            help="Write NAME.py, NAME.ptx, NAME.cubin and kernels.json here.", metavar="DIR"
        ),
    ],
    target: Annotated[
        str, typer.Option(help="cuda: and a compute capability, such as cuda:80 or cuda:100.")
    ] = "cuda:90",
    min_ops: Annotated[
        int, typer.Option(min=1, help="Leave out regions with fewer operators.")
    ] = 10,
) -> None:
    """Compile a saved graph to Triton kernels for a GPU that need not be there.

    The graph may be one of a CPU. Prints what each kernel takes of the GPU: registers per thread,
    shared memory per block, and bytes spilled per thread.

    The exit status is 1 when a region or a kernel cannot be compiled, and 2 when the file or the
    target cannot be used, or Triton is not installed.
    """
    from graphopt.commands.lower import run_lower

    run_lower(file, target, out, min_ops)
