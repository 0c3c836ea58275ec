"""Error messages and exit statuses of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from graphopt.errors import GraphOptError

FAILED, MISUSED = 1, 2
"""Exit status when a pass fails or is refused, and when the command cannot be carried out."""


@contextmanager
def reported(command: str, status: int = MISUSED) -> Iterator[None]:
    """While active, an error of graphopt is printed and ends the command with `status`."""
    try:
        yield
    except GraphOptError as error:
        message = Text.assemble((f"graphopt {command}: ", "bold red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(status) from error
