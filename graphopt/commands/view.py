"""`graphopt view`: a saved graph, or a trace, as one page of HTML."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.commands.errors import reported
from graphopt.errors import MissingFileError
from graphopt.readable import readable_bytes
from graphopt.runtime import places
from graphopt.saved import load_description
from graphopt.viewing import trace_page, view_page


def run_view(file: Path, out: Path | None, dumps: Path | None) -> None:
    """Write the page of a file next to it, or to `out`."""
    out = out or file.with_suffix(".html")
    with reported("view"):
        text = _text(file, dumps)
        places.write(places.place(out), text)
    Console().print(f"{out}: {readable_bytes(len(text.encode()))}", highlight=False)


def _text(file: Path, dumps: Path | None) -> str:
    if file.suffix == ".json":
        return trace_page(places.read_text(file), file.name)
    return view_page(load_description(file), file.name, {} if dumps is None else _diffs(dumps))


def _diffs(folder: Path) -> dict[str, list[str]]:
    """By name of the pass, what it changed: files that a pipeline with `dump_dir` leaves."""
    found = sorted(places.place(folder).glob("after_*.diff"))
    if not found:
        raise MissingFileError(
            f"{folder} holds no after_PASS.diff: `graphopt optimize --dump` and"
            " dump_dir= write these"
        )
    return {path.stem.removeprefix("after_"): places.read_text(path).splitlines() for path in found}
