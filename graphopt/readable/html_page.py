"""Self-contained HTML pages: a graph with its timeline, or lanes of blocks over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

Block = tuple[str, float, float, str, "int | None", str]
"""Of a lane: its kind (a colour of the template), start and length in seconds, what is shown under
the pointer, the number of its node or None, and a label."""


def page_of(contents: Mapping[str, Any]) -> str:
    """An HTML page that embeds contents as JSON, escaped so that no text ends its script."""
    template = files("graphopt.readable").joinpath("template.html").read_text(encoding="utf-8")
    data = json.dumps(contents, separators=(",", ":"), ensure_ascii=True)
    return template.replace("@DATA@", data.replace("<", "\\u003c"))


def lanes_page(
    title: str,
    summary: str,
    lanes: Sequence[Mapping[str, Any]],
    *,
    table: str = "",
    heads: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """An HTML page of lanes over one time axis, and a table.

    Args:
        lanes: each has a `name` and `blocks` (`Block`).
        table: the name of the table.
        heads, rows: its cells.
    """
    ends = (start + length for lane in lanes for _, start, length, *_ in lane["blocks"])
    contents: dict[str, Any] = {
        name: [] for name in ("nodes", "phases", "modules", "places", "passes")
    }
    return page_of(
        contents
        | {"title": title, "summary": summary, "legend": "", "wide": -1, "lanes": list(lanes)}
        | {"table": table, "heads": list(heads), "seconds": max(ends, default=0.0)}
        | {"collectives": [{"node": None, "cells": list(row)} for row in rows]}
    )
