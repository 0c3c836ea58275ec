"""Graphs and diffs in colour, for terminals."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from graphopt.readable.columns import cells, heading, listing_text
from graphopt.readable.listing import LATE, LAUNCH, UPDATE, WAIT, Listing, ListingRow

_STYLES = {"shape": "cyan", "size": "dim", "note": "magenta", "place": "dim"}
_MARK_STYLES = {LAUNCH: "bold green", WAIT: "bold yellow", UPDATE: "blue", LATE: "bold magenta"}
_DIFF_STYLES = {"-": "red", "+": "green", "@": "cyan"}


def print_listing(listing: Listing, console: Console) -> None:
    """Prints a graph, in colour if `console` has colours; long rows are not broken."""
    if console.color_system is None:
        console.out(listing_text(listing), end="", highlight=False)
    else:
        _print_coloured(listing, console)


def _print_coloured(listing: Listing, console: Console) -> None:
    for text in (*listing.summary, ""):
        console.out(text, highlight=False)
    for title, rows in listing.sections:
        block = Text.assemble((heading(title), "bold"))
        for row in rows:
            block.append_text(_coloured(row))
        console.print(block, soft_wrap=True)


def print_diff(difference: str, console: Console) -> None:
    """Prints a unified diff, in colour if `console` has colours."""
    if console.color_system is None:
        console.out(difference, end="", highlight=False)
        return
    for text in difference.splitlines():
        style = "bold" if text.startswith(("---", "+++")) else _DIFF_STYLES.get(text[0])
        console.out(text, style=style, highlight=False)


def _coloured(row: ListingRow) -> Text:
    mark_style = _MARK_STYLES.get(row.marks[:1], "")
    styles = {**_STYLES, "marks": mark_style, "text": mark_style.removeprefix("bold ")}
    columns = [(text, styles.get(name, "")) for name, text in cells(row, bytes=True, places=True)]
    line = Text.assemble("\n", *columns, no_wrap=True)
    line.rstrip()
    return line
