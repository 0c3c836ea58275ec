"""A simulated step as a trace for Perfetto, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from graphopt.ir.metadata import phase_of, source_line
from graphopt.readable.columns import first_of, readable_bytes
from graphopt.readable.html_page import lanes_page
from graphopt.readable.trace_events import TraceEvent, trace_text

if TYPE_CHECKING:
    from graphopt.schedule.timeline import CollectiveSlot, ComputeSlot, Timeline

_MOST_BLOCKS = 3000
"""The most compute blocks on a page; more would be narrower than a pixel."""
NAMES_SHOWN = 4

PARAMETERS = "parameters"
"""The label of the fact that takes most room."""


def chrome_trace(timeline: Timeline) -> str:
    """Returns JSON in the trace event format, with one thread for compute and one for each
    group."""
    begin = timeline.begin
    lanes = {"compute": [_compute_event(slot, begin) for slot in timeline.compute]}
    for group, slots in _by_group(timeline).items():
        lanes[f"group {group}"] = [
            TraceEvent(
                slot.message.launch.name,
                slot.start - begin,
                slot.end - slot.start,
                "exposed" if slot.exposed else "hidden",
                facts_of(slot),
            )
            for slot in slots
        ]
    about = {
        "step_seconds": timeline.step_seconds,
        "exposed_comm_seconds": timeline.exposed_comm_seconds,
        "bound_seconds": timeline.bound_seconds,
    }
    return trace_text(lanes, about)


def _compute_event(slot: ComputeSlot, begin: float) -> TraceEvent:
    kind = phase_of(slot.node) or "graph"
    return TraceEvent(slot.node.name, slot.start - begin, slot.end - slot.start, kind, {})


def page(timeline: Timeline) -> str:
    """Returns HTML with a lane for compute and one for each group, and a table of the
    collectives."""
    in_flight = readable_bytes(timeline.peak_bytes_in_flight)
    summary = f"{timeline}. In flight at most {in_flight}. Gaps in the first lane are waits."
    lanes = list(lanes_of(timeline, {}))
    facts = [facts_of(slot) for slot in timeline.collectives]
    heads, rows = list(facts[0]) if facts else [], [list(each.values()) for each in facts]
    return lanes_page("Simulated step", summary, lanes, table="collectives", heads=heads, rows=rows)


def lanes_of(timeline: Timeline, index: Mapping[fx.Node, int]) -> Iterator[dict[str, Any]]:
    """Yields a lane of compute and one for each group as JSON-ready values: for each block its
    kind, begin, seconds, text, node number or None, and an empty label."""
    blocks = [_compute_block(timeline, run, index) for run in _compute_runs(timeline)]
    yield {"name": "compute", "blocks": blocks}
    for group, slots in _by_group(timeline).items():
        blocks = [_block(timeline, slot, index) for slot in slots]
        yield {"name": f"group {group}", "blocks": blocks}


def _compute_runs(timeline: Timeline) -> Iterator[list[ComputeSlot]]:
    """Yields runs of adjacent computing nodes, each drawn as one block."""
    least = (timeline.end - timeline.begin) / _MOST_BLOCKS
    run: list[ComputeSlot] = []
    for slot in timeline.compute:
        if run and (slot.start > run[-1].end or slot.end - run[0].start > least):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


def _compute_block(
    timeline: Timeline, run: Sequence[ComputeSlot], index: Mapping[fx.Node, int]
) -> list[Any]:
    node = max(run, key=lambda slot: slot.end - slot.start).node
    start, seconds = run[0].start, run[-1].end - run[0].start
    lines = [f"%{node.name} = {node.target}" + (f" and {len(run) - 1} more" if run[1:] else "")]
    source = source_line(node)
    lines += [_milliseconds(seconds), *([str(source)] if source is not None else [])]
    phase = "late" if node in timeline.program.late else phase_of(node) or "graph"
    return [phase, start - timeline.begin, seconds, "\n".join(lines), index.get(node), ""]


def _block(timeline: Timeline, slot: CollectiveSlot, index: Mapping[fx.Node, int]) -> list[Any]:
    hover = "\n".join(f"{name}: {value}" for name, value in facts_of(slot).items())
    kind = "exposed" if slot.exposed else "hidden"
    times = slot.start - timeline.begin, slot.end - slot.start
    return [kind, *times, hover, index.get(slot.message.launch), ""]


def facts_of(slot: CollectiveSlot) -> dict[str, str]:
    """Returns what describes a collective, as texts by label; tables have them as columns."""
    message = slot.message
    return {
        "launch": f"%{message.launch.name}",
        "collective": message.kind,
        "group": message.group,
        "bytes": readable_bytes(message.nbytes),
        PARAMETERS: first_of(message.parameters, NAMES_SHOWN),
        "time": _milliseconds(slot.end - slot.start),
        "queued": _milliseconds(slot.start - slot.launched),
        "exposed": _milliseconds(slot.exposed),
        "waited for by": reader_text(slot),
    }


def reader_text(slot: CollectiveSlot) -> str:
    """Formats the node that forces the wait, and its iteration."""
    reader = slot.message.reader
    if reader is None:
        return "nobody"
    return f"%{reader.name}" + (", one iteration later" if slot.message.lag else "")


def _by_group(timeline: Timeline) -> dict[str, list[CollectiveSlot]]:
    """Returns the collectives of each group, the groups in the order of their first launch."""
    found: dict[str, list[CollectiveSlot]] = {}
    for slot in timeline.collectives:
        found.setdefault(slot.message.group, []).append(slot)
    return found


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
