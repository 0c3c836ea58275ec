"""Declares `graphopt passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from graphopt.cli.options import Imports

EXAMPLES = """
Examples:

    graphopt passes

    graphopt passes --json

    graphopt passes --import my_passes.py
"""


def passes(
    modules: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List all passes: what each does, its options, what it needs, whether it keeps all bits."""
    from graphopt.commands.passes import run_passes

    run_passes(modules or [], as_json)
