"""A simulated step as a trace for Perfetto, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from graphopt.ir.metadata import phase_of, source_line
from graphopt.readable.columns import readable_bytes
from graphopt.readable.html_page import lanes_page
from graphopt.readable.trace_events import TraceEvent, trace_text
from graphopt.schedule.simulated_step import CollectiveSlot, ComputeSlot, SimulatedStep

_MOST_BLOCKS = 3000
"""The most compute blocks on a page; more would be narrower than a pixel."""
_NAMES_SHOWN = 4

PARAMETERS = "parameters"
"""The label of the fact that takes most room."""


def chrome_trace(timeline: SimulatedStep) -> str:
    """Returns JSON in the trace event format, with one thread for compute and one for each
    group."""
    begin = timeline.begin
    lanes = {"compute": [_compute_event(slot, begin) for slot in timeline.compute]}
    for group in _groups(timeline):
        lanes[f"group {group}"] = [
            TraceEvent(
                slot.message.launch.name,
                slot.start - begin,
                slot.end - slot.start,
                "exposed" if slot.exposed else "hidden",
                facts_of(slot),
            )
            for slot in timeline.collectives
            if slot.message.group == group
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


def page(timeline: SimulatedStep) -> str:
    """Returns HTML with a lane for compute and one for each group, and a table of the
    collectives."""
    in_flight = readable_bytes(timeline.peak_bytes_in_flight)
    summary = f"{timeline}. In flight at most {in_flight}. Gaps in the first lane are waits."
    drawn = [
        {"name": name, "blocks": [[b.kind, b.start, b.seconds, b.hover, None, ""] for b in blocks]}
        for name, blocks in _lanes(timeline)
    ]
    facts = [facts_of(slot) for slot in timeline.collectives]
    heads, rows = list(facts[0]) if facts else [], [list(each.values()) for each in facts]
    return lanes_page("Simulated step", summary, drawn, table="collectives", heads=heads, rows=rows)


def lanes_of(timeline: SimulatedStep, index: Mapping[fx.Node, int]) -> Iterator[dict[str, Any]]:
    """Yields the lanes of `page` as JSON-ready values: for each block its kind, begin, seconds,
    text and node number."""
    for name, blocks in _lanes(timeline):
        numbers = (None if b.node is None else index.get(b.node) for b in blocks)
        facts = ([b.kind, b.start, b.seconds, b.hover] for b in blocks)
        rows = [[*fact, number] for fact, number in zip(facts, numbers, strict=True)]
        yield {"name": name, "blocks": rows}


class _Block(NamedTuple):
    kind: str
    start: float
    seconds: float
    hover: str
    node: fx.Node | None


def _lanes(timeline: SimulatedStep) -> Iterator[tuple[str, list[_Block]]]:
    """Yields one lane of compute and one for each group."""
    yield "compute", list(_compute_blocks(timeline))
    for group in _groups(timeline):
        slots = [slot for slot in timeline.collectives if slot.message.group == group]
        yield f"group {group}", [_block(timeline, slot) for slot in slots]


def _compute_blocks(timeline: SimulatedStep) -> Iterator[_Block]:
    """Yields computing nodes as blocks, short adjacent ones merged."""
    least = (timeline.end - timeline.begin) / _MOST_BLOCKS
    run: list[ComputeSlot] = []
    for slot in timeline.compute:
        if run and (slot.start > run[-1].end or slot.end - run[0].start > least):
            yield _compute_block(timeline, run)
            run = []
        run.append(slot)
    if run:
        yield _compute_block(timeline, run)


def _compute_block(timeline: SimulatedStep, run: Sequence[ComputeSlot]) -> _Block:
    longest = max(run, key=lambda slot: slot.end - slot.start)
    node = longest.node
    start, end = run[0].start, run[-1].end
    lines = [f"%{node.name} = {node.target}" + (f" and {len(run) - 1} more" if run[1:] else "")]
    source = source_line(node)
    lines += [_milliseconds(end - start), *([str(source)] if source is not None else [])]
    phase = "late" if node in timeline.program.late else phase_of(node) or "graph"
    return _Block(phase, start - timeline.begin, end - start, "\n".join(lines), node)


def _block(timeline: SimulatedStep, slot: CollectiveSlot) -> _Block:
    hover = "\n".join(f"{name}: {value}" for name, value in facts_of(slot).items())
    kind = "exposed" if slot.exposed else "hidden"
    begin = slot.start - timeline.begin
    return _Block(kind, begin, slot.end - slot.start, hover, slot.message.launch)


def facts_of(slot: CollectiveSlot) -> dict[str, str]:
    """Returns what describes a collective, as texts by label; tables have them as columns."""
    message = slot.message
    return {
        "launch": f"%{message.launch.name}",
        "collective": message.kind,
        "group": message.group,
        "bytes": readable_bytes(message.nbytes),
        PARAMETERS: parameters_text(message.parameters),
        "time": _milliseconds(slot.end - slot.start),
        "queued": _milliseconds(slot.start - slot.launched),
        "exposed": _milliseconds(slot.exposed),
        "waited for by": reader_text(slot),
    }


def parameters_text(names: Sequence[str]) -> str:
    """Formats the first parameter name and the number of further ones."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def reader_text(slot: CollectiveSlot) -> str:
    """Formats the node that forces the wait, and its iteration."""
    reader = slot.message.reader
    if reader is None:
        return "nobody"
    return f"%{reader.name}" + (", one iteration later" if slot.message.lag else "")


def _groups(timeline: SimulatedStep) -> list[str]:
    """Returns the groups in the order of their first launch."""
    return list(dict.fromkeys(slot.message.group for slot in timeline.collectives))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
