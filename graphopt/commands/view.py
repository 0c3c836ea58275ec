"""Implementation of `graphopt view`, which writes a saved graph or a trace as an HTML page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.commands.errors import reported
from graphopt.errors import MissingFileError
from graphopt.ir import user_files as places
from graphopt.readable import readable_bytes
from graphopt.saved import load_description
from graphopt.viewing import trace_page, view_page


def run_view(file: Path, out: Path | None, dumps: Path | None) -> None:
    """Writes the HTML page of a file next to it, or to `out`."""
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
    """The change that each pass made, by its name, from the files of a `dump_dir`."""
    found = sorted(places.place(folder).glob("after_*.diff"))
    if not found:
        raise MissingFileError(
            f"{folder} holds no after_PASS.diff: `graphopt optimize --dump` and"
            " dump_dir= write these"
        )
    return {path.stem.removeprefix("after_"): places.read_text(path).splitlines() for path in found}
