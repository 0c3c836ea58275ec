"""One page of HTML that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from torch import fx

from graphopt.errors import FileError
from graphopt.viewing.contents import HEADS, contents_of


def view_page(
    gm: fx.GraphModule, title: str = "step", diffs: Mapping[str, Sequence[str]] | None = None
) -> str:
    """A graph as a page: phases, modules folded, collectives, passes, timeline, search.

    Args:
        gm: nothing in it changes.
        title: over the page.
        diffs: for passes by name, the lines of the difference that they made.

    >>> import graphopt, torch
    >>> from graphopt.viewing import view_page
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> "aten.relu.default" in view_page(gm, "a step")
    True
    """
    return page_of(contents_of(gm, title, diffs))


def trace_page(text: str, title: str = "trace") -> str:
    """A trace in the trace event format, such as ``Timeline.save_chrome_trace`` writes, as a page.

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
    seconds = max((start + length for _, start, length, *_ in _all(lanes)), default=0.0)
    nothing: dict[str, Any] = {
        name: [] for name in ("nodes", "phases", "modules", "places", "collectives", "passes")
    }
    about = {"title": title, "summary": f"{len(events)} events", "legend": "", "heads": HEADS}
    return page_of({**nothing, **about, "wide": 0, "lanes": lanes, "seconds": seconds})


def page_of(contents: Mapping[str, Any]) -> str:
    """The page that shows `contents_of` a graph. Nothing in it can end its script."""
    template = files("graphopt.viewing").joinpath("template.html").read_text(encoding="utf-8")
    data = json.dumps(contents, separators=(",", ":"), ensure_ascii=True)
    return template.replace("@DATA@", data.replace("<", "\\u003c"))


def _lanes(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    names: dict[Any, str] = {}
    blocks: dict[Any, list[Any]] = {}
    for event in events:
        lane = event.get("pid", 0), event.get("tid", 0)
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[lane] = str(event["args"]["name"])
        if event.get("ph") == "X":
            start, length = 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
            blocks.setdefault(lane, []).append([_kind(event), start, length, _hover(event), None])
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


def _all(lanes: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    for lane in lanes:
        yield from lane["blocks"]
