"""Lanes of events over time as JSON in the trace event format, which Perfetto and Chrome show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class TraceEvent(NamedTuple):
    """One event of a lane: its name, start and length in seconds, kind, and further facts."""

    name: str
    start: float
    seconds: float
    kind: str
    facts: Mapping[str, Any]


def trace_text(lanes: Mapping[str, Iterable[TraceEvent]], about: Mapping[str, Any]) -> str:
    """The JSON of a trace: a thread for each lane, by name, and figures about the whole."""
    events: list[dict[str, Any]] = []
    for number, (name, lane) in enumerate(lanes.items()):
        where = {"pid": 0, "tid": number}
        events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": name}})
        for event in lane:
            times = {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
            said = {"name": event.name, "cat": event.kind, "args": dict(event.facts)}
            events.append({"ph": "X", **where, **times, **said})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)})
