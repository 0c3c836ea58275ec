"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Phase(str, Enum):
    """The parts of a training step that can be shown."""

    forward = "forward"
    backward = "backward"
    communication = "communication"
    optimizer = "optimizer"


class Verify(str, Enum):
    """The levels at which each pass is checked."""

    off = "off"
    dependencies = "dependencies"
    equivalence = "equivalence"


GraphFile = Annotated[
    Path, typer.Argument(help="A graph saved by graphopt.saved.save_graph.", metavar="FILE")
]

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Import passes from a file (my_passes.py) or a module first. May be repeated.",
        metavar="MODULE",
    ),
]


def not_empty(pipeline: str | None) -> str | None:
    """Refuses a pipeline that names no pass."""
    if pipeline is not None and not pipeline.strip():
        raise typer.BadParameter("names no pass; `none` applies none, `default` the usual ones")
    return pipeline
