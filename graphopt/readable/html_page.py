"""Self-contained HTML pages: a graph with its timeline, or lanes of blocks over time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from graphopt.errors import FileError

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


def trace_page(text: str, title: str = "trace") -> str:
    """An HTML page of a trace in trace event format, such as ``Timeline.save_chrome_trace`` writes.

    Raises:
        FileError: it is no such trace.

    >>> from graphopt.viewing import trace_page
    >>> events = '[{"ph": "X", "name": "mm", "ts": 0, "dur": 5, "pid": 0, "tid": 0}]'
    >>> trace_page(events).startswith("<!DOCTYPE html>")
    True
    """
    try:
        events = json.loads(text)
        events = events["traceEvents"] if isinstance(events, dict) else events
        lanes = list(_lanes(events))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{title} is not a trace: {type(error).__name__}: {error}") from error
    return lanes_page(title, f"{len(events)} events", lanes)


def _lanes(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    names: dict[Any, str] = {}
    blocks: dict[Any, list[Any]] = {}
    for event in events:
        lane = event.get("pid", 0), event.get("tid", 0)
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[lane] = str(event["args"]["name"])
        if event.get("ph") == "X":
            start, length = 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
            block = [_kind(event), start, length, _hover(event), None, ""]
            blocks.setdefault(lane, []).append(block)
    first = min((block[1] for found in blocks.values() for block in found), default=0.0)
    for lane in sorted(blocks, key=str):
        for block in blocks[lane]:
            block[1] -= first
        yield {"name": names.get(lane, f"{lane[0]}.{lane[1]}"), "blocks": blocks[lane]}


def _kind(event: Mapping[str, Any]) -> str:
    return str(event.get("cat") or "other").partition(",")[0]


def _hover(event: Mapping[str, Any]) -> str:
    facts = [f"{name}: {value}" for name, value in (event.get("args") or {}).items()]
    return "\n".join([str(event.get("name")), f"{event['dur'] / 1e3:.3f} ms", *facts])
