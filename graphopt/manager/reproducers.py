"""Files that hold the graph on which a pass or a stage failed, to reproduce the failure."""

from __future__ import annotations

import os
import shlex
import tempfile
from functools import cache
from pathlib import Path

from torch import fx

from graphopt.saved import save_graph

FOLDER = "graphopt-repro"
VARIABLE = "GRAPHOPT_REPRO"
"""The environment variable that names the folder for such files."""


def reproducer_folder(dump_dir: Path | None) -> Path:
    """Returns the folder for reproducers: GRAPHOPT_REPRO, else the dump folder, else a temporary
    folder that is kept."""
    said = os.environ.get(VARIABLE)
    if said:
        return Path(said)
    return dump_dir / FOLDER if dump_dir is not None else _temporary()


@cache
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}-"))


def reproducing_command(gm: fx.GraphModule, folder: Path, options: str | None) -> str:
    """Saves a graph, and returns the command that runs passes or stages on it.

    Args:
        options: which ones; None where that has no text form.
    """
    try:
        path = _save(gm, folder)
    except Exception as error:  # the error that is being explained matters more
        return f"no file was written ({type(error).__name__}: {error})"
    if options is None:
        return f"{path} holds the graph; the options have no text form"
    return f"graphopt optimize {shlex.quote(str(path))} {options}"


def _save(gm: fx.GraphModule, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_file(folder)
    try:
        save_graph(gm, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _free_file(folder: Path) -> Path:
    """Returns a new file with the next free number, safe against other ranks doing the same."""
    number = 1
    while True:
        path = folder / f"{number:02d}.pt"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            continue
        return path
