"""Pipeline timelines in the trace event format of Chrome and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from graphopt.pipelining.timeline.slots import KIND_NAMES, ScheduleTimes, Slot


def chrome_trace(times: ScheduleTimes) -> str:
    """The timeline as JSON: an event for each slot, a process for each rank."""
    events: list[dict[str, Any]] = []
    for figures in times.ranks:
        stages = ", ".join(map(str, figures.stages))
        name = f"rank {figures.rank}: stage{'s' * (len(figures.stages) > 1)} {stages}"
        events.append(_metadata("process_name", figures.rank, name=name))
        events.append(_metadata("process_sort_index", figures.rank, sort_index=figures.rank))
        events.append(_metadata("thread_name", figures.rank, name="actions"))
    events += [_event(slot, times.start) for slot in times.slots]
    described = {
        "schedule": times.schedule,
        "step_seconds": times.step_seconds,
        "bubble_share": times.bubble_share,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": described})


def _event(slot: Slot, start: float) -> dict[str, Any]:
    return {
        "name": str(slot.action),
        "cat": KIND_NAMES[slot.kind],
        "ph": "X",
        "pid": slot.rank,
        "tid": 0,
        "ts": (slot.start - start) * 1e6,
        "dur": slot.seconds * 1e6,
        "args": {"stage": slot.stage, "microbatch": slot.microbatch},
    }


def _metadata(event: str, rank: int, /, **args: Any) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": rank, "tid": 0, "args": args}
