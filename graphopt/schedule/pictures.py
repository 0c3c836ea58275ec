"""A simulated step as a trace for Perfetto, and as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from graphopt.ir.metadata import phase_of, source_line
from graphopt.readable.columns import readable_bytes
from graphopt.readable.html_page import lanes_page
from graphopt.schedule.simulated_step import CollectiveSlot, ComputeSlot, SimulatedStep

_MOST_BLOCKS = 3000
"""The most compute blocks on a page; more would be narrower than a pixel."""
_NAMES_SHOWN = 4


def chrome_trace(timeline: SimulatedStep) -> str:
    """Returns JSON in the trace event format, with one thread for compute and one for each
    group."""
    groups = _groups(timeline)
    events = [_named(0, "compute"), *(_named(tid, f"group {g}") for g, tid in groups.items())]
    events += [
        _event(slot.node.name, 0, slot.start - timeline.begin, slot.end - slot.start, {})
        for slot in timeline.compute
    ]
    for slot in timeline.collectives:
        arguments = dict(_facts(slot))
        tid = groups[slot.message.group]
        begin = slot.start - timeline.begin
        name = slot.message.launch.name
        events.append(_event(name, tid, begin, slot.end - slot.start, arguments))
    about = {
        "step_seconds": timeline.step_seconds,
        "exposed_comm_seconds": timeline.exposed_comm_seconds,
        "bound_seconds": timeline.bound_seconds,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def page(timeline: SimulatedStep) -> str:
    """Returns HTML with a lane for compute and one for each group, and a table of the
    collectives."""
    summary = (
        f"{timeline}; with due dates {1e3 * timeline.preemptive_bound_seconds:.3f} ms. In flight at"
        f" most {readable_bytes(timeline.peak_bytes_in_flight)}. What has to become shorter for the"
        f" step to become shorter: {_critical(timeline)}. Gaps in the first lane are waits."
    )
    drawn = [
        {"name": name, "blocks": [[b.kind, b.start, b.seconds, b.hover, None, ""] for b in blocks]}
        for name, blocks in _lanes(timeline)
    ]
    heads, rows = _table(timeline)
    return lanes_page("Simulated step", summary, drawn, table="collectives", heads=heads, rows=rows)


def _critical(timeline: SimulatedStep) -> str:
    """Formats the parts of the critical path with their seconds, longest first."""
    seconds: dict[str, float] = {}
    for part in timeline.critical_path:
        name = "compute" if part.message is None else f"%{part.message.launch.name}"
        seconds[name] = seconds.get(name, 0.0) + part.end - part.start
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    named = [f"{name} {_milliseconds(seconds[name])}" for name in longest[:_NAMES_SHOWN]]
    more = len(longest) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


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
    facts = "\n".join(f"{name}: {value}" for name, value in _facts(slot))
    hover = f"%{slot.message.launch.name}\n{facts}"
    kind = "exposed" if slot.exposed else "hidden"
    begin = slot.start - timeline.begin
    return _Block(kind, begin, slot.end - slot.start, hover, slot.message.launch)


def _facts(slot: CollectiveSlot) -> Iterator[tuple[str, str]]:
    """Yields labels and values that describe a collective."""
    message = slot.message
    yield "collective", message.kind
    yield "bytes", readable_bytes(message.nbytes)
    yield "parameters", parameters_text(message.parameters)
    yield "time", _milliseconds(slot.end - slot.start)
    yield "queued", _milliseconds(slot.start - slot.launched)
    yield "exposed", _milliseconds(slot.exposed)
    yield "waited for by", reader_text(slot)


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


def _table(timeline: SimulatedStep) -> tuple[list[str], list[list[str]]]:
    heads = ["launch", "collective", "bytes", "parameters", "time", "queued", "exposed", "reader"]
    rows = [
        [f"%{slot.message.launch.name}", *(value for _, value in _facts(slot))]
        for slot in timeline.collectives
    ]
    return heads, rows


def _groups(timeline: SimulatedStep) -> dict[str, int]:
    """Numbers the groups by their first launch."""
    found = dict.fromkeys(slot.message.group for slot in timeline.collectives)
    return {group: index + 1 for index, group in enumerate(found)}


def _event(name: str, tid: int, start: float, seconds: float, args: Any) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {"name": name, "ph": "X", "pid": 0, "tid": tid, **times, "args": args}


def _named(tid: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
