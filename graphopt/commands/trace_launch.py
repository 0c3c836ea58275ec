"""Schedules run on local gloo ranks, for `graphopt trace --measure`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphopt.commands.trace_rank import TraceTask
from graphopt.demo import DemoError
from graphopt.demo.launch import Event, loopback, run_ranks
from graphopt.errors import GraphOptError
from graphopt.pipelining.timeline import ScheduleTimeline, Slot

_RANK = ("-m", "graphopt.commands.trace_rank")


def measure_on_ranks(
    pipe: str, schedules: Sequence[tuple[str, int]], microbatches: int, ranks: int
) -> dict[str, ScheduleTimeline]:
    """A measured step of each schedule, by name.

    Args:
        pipe: `module_or_file.py:function`.
        schedules: names, with the number of stages of each.

    Raises:
        GraphOptError: a rank failed; none is left.
    """
    found: dict[str, ScheduleTimeline] = {}

    def on_event(rank: int, event: Event) -> None:
        slots = tuple(Slot(*slot) for slot in event["slots"])
        found[event["schedule"]] = ScheduleTimeline(event["schedule"], "measured", ranks, slots)

    with tempfile.TemporaryDirectory(prefix="graphopt-") as name:
        TraceTask(pipe, schedules, microbatches).save(Path(name))
        try:
            run_ranks(_RANK, ranks, Path(name), on_event, environment=loopback())
        except DemoError as error:
            raise GraphOptError(str(error)) from error
    return found
