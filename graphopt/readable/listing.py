"""Graphs as rows that say what each node computes and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH, WAIT, UPDATE, LATE = "▶", "■", "●", "↻"
MARKS = {
    LAUNCH: "launch of a collective",
    WAIT: "wait for it",
    UPDATE: "state update",
    LATE: "runs one iteration late",
}


@dataclass
class ListingRow:
    """One row of a listing: a node, or a part of the output.

    Attributes:
        marks: some of `MARKS`.
        text: name, operator and arguments.
        shape: dtypes and shapes of what it computes.
        size: its bytes; None for views and numbers.
        note: where it runs, if late.
        place: module path or qualified name, source line, pass that made it.
    """

    text: str
    marks: str = ""
    shape: str = ""
    size: int | None = None
    note: str = ""
    place: str = ""


Section = tuple[str, list[ListingRow]]
"""A heading with rows below."""


@dataclass(frozen=True)
class Listing:
    """A graph as a list of rows under headings, with a summary.

    Attributes:
        summary: lines above: how large the graph is, and what the marks mean.
        sections: the sections in the order of the graph, a new one where the phase changes.
    """

    summary: list[str]
    sections: list[Section]
