"""A step as torch's profiler recorded it, to lay over a predicted one.

    with torch.profiler.profile() as profile:
        for batch in batches:
            step(model, optimizer, batch)       each call is a range "graphopt.step" in the trace
    profile.export_chrome_trace("trace.json")

A step lasts from the begin of its range to that of the next: what a program does between two steps
is part of it, as in a `Timeline`. On a GPU its kernels are shown, else the operators of the thread
that calls the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

from graphopt.errors import FileError
from graphopt.runtime.places import place, read_text
from graphopt.runtime.ranges import STEP

_COLLECTIVES = ("gloo:", "nccl", "ncclDevKernel")
_WAITS = ("_c10d_functional::wait_tensor",)


class MeasuredSlot(NamedTuple):
    """Something that took time.

    Attributes:
        name: of the operator, kernel or collective.
        start: seconds after the begin of the step.
        seconds: that it took.

    >>> from graphopt.schedule import MeasuredSlot
    >>> MeasuredSlot("aten::mm", 0.001, 0.002).end
    0.003
    """

    name: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """Seconds after the begin of the step."""
        return self.start + self.seconds


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was measured.

    Attributes:
        step_seconds: from its begin to that of the next.
        compute: operators or kernels, none within another, without waits for collectives.
        collectives: that the step launched, in order; the last may end after it.

    >>> from graphopt.schedule import MeasuredSlot, MeasuredStep
    >>> MeasuredStep(0.1, [MeasuredSlot("aten::mm", 0.0, 0.05)], []).step_seconds
    0.1
    """

    step_seconds: float
    compute: Sequence[MeasuredSlot]
    collectives: Sequence[MeasuredSlot]

    def __str__(self) -> str:
        busy = sum(slot.seconds for slot in self.compute)
        return f"step {1e3 * self.step_seconds:.3f} ms, of it operators {1e3 * busy:.3f} ms"


def measured_step(trace: str | PathLike[str]) -> MeasuredStep:
    """The step of median time in a trace of torch's profiler.

    Args:
        trace: a file that ``torch.profiler.profile.export_chrome_trace`` has written, of two calls
            of a step or more.

    Raises:
        FileError: the file cannot be read, is no such trace, or holds fewer than two steps.

    >>> from graphopt.schedule import measured_step
    >>> measured_step("missing.json")
    Traceback (most recent call last):
    ...
    graphopt.errors.MissingFileError: ...
    """
    try:
        events = [e for e in json.loads(read_text(place(trace)))["traceEvents"] if e["ph"] == "X"]
        ranges = sorted((e for e in events if e["name"] == STEP), key=_start)
    except (ValueError, LookupError, TypeError) as error:
        raise FileError(f"{trace}: not a trace of torch.profiler ({error!r})") from error
    if len(ranges) < 2:
        raise FileError(
            f"{trace}: {len(ranges)} steps of graphopt, where two are needed\n"
            "  hint:  profile two calls of the captured step or more, with"
            " torch.profiler.ProfilerActivity.CPU among the activities"
        )
    return _step(events, *_of_median_time(ranges))


def _of_median_time(ranges: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], float]:
    """A range, and when the next one begins."""
    found = sorted((_start(after) - _start(one), _start(one)) for one, after in pairwise(ranges))
    seconds, begin = found[len(found) // 2]
    return next(each for each in ranges if _start(each) == begin), begin + seconds


def _step(
    events: Sequence[Mapping[str, Any]], begun: Mapping[str, Any], end: float
) -> MeasuredStep:
    begin = _start(begun)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    operators = kernels or [
        event
        for event in events
        if event.get("cat") == "cpu_op" and (event["pid"], event["tid"]) == _thread(begun)
    ]
    inside = [e for e in operators if begin <= _start(e) < end and not _communicates(e)]
    sent = [e for e in (kernels or events) if begin <= _start(e) < end and _communicates(e)]
    return MeasuredStep(
        (end - begin) / 1e6,
        [slot for slot in _outermost(inside, begin) if slot.name not in _WAITS],
        [_slot(event, begin) for event in sorted(sent, key=_start)],
    )


def _outermost(events: Sequence[Mapping[str, Any]], begin: float) -> Iterator[MeasuredSlot]:
    """Events that are in no other one."""
    end = float("-inf")
    for event in sorted(events, key=lambda e: (_start(e), -float(e["dur"]))):
        if _start(event) >= end:
            end = _start(event) + float(event["dur"])
            yield _slot(event, begin)


def _slot(event: Mapping[str, Any], begin: float) -> MeasuredSlot:
    return MeasuredSlot(event["name"], (_start(event) - begin) / 1e6, float(event["dur"]) / 1e6)


def _communicates(event: Mapping[str, Any]) -> bool:
    return str(event["name"]).startswith(_COLLECTIVES)


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _thread(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event["pid"], event["tid"]
