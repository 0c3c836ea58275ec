"""Implementation of `graphopt trace`, which draws pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphopt.commands.errors import reported
from graphopt.commands.trace_pipe import PipeSource
from graphopt.demo.launch import threads_per_rank
from graphopt.errors import GraphOptError
from graphopt.pipelining.timeline import (
    SCHEDULES,
    ScheduleError,
    ScheduleOrder,
    ScheduleTimeline,
    StageDurations,
    measure_durations,
    predict_schedule,
)
from graphopt.pipelining.timeline.orders import ScheduleKind, find_schedule
from graphopt.pipelining.timeline.pages import schedules_page
from graphopt.pipelining.timeline.terminal_picture import percent, seconds_text
from graphopt.runtime.places import make_folder, place, write

_USUAL_RANKS = 4
_FORWARD, _BACKWARD = (1.0,), (2.0,)


@dataclass(frozen=True)
class TraceArguments:
    """The command line arguments of `graphopt trace`.

    Attributes:
        pipe: `module_or_file.py:function`, or None.
        schedule: a name, "all", or a file of actions.
        forward, backward: seconds on one rank, or of each stage; None where not given.
        transfer: seconds between ranks.
        out: a folder for files.
    """

    pipe: str | None
    schedule: str
    microbatches: int
    ranks: int | None
    stages: int | None
    forward: tuple[float, ...] | None
    backward: tuple[float, ...] | None
    transfer: float
    out: Path | None


@dataclass(frozen=True)
class SchedulePicture:
    """The timeline of one schedule, or the reason for having none."""

    name: str
    stages: int = 0
    picture: ScheduleTimeline | None = None
    reason: str = ""


def run_trace(request: TraceArguments) -> None:
    """Prints the figures of the schedules, and writes their pictures."""
    console = Console()
    with reported("trace"):
        if request.out is not None:
            request = replace(request, out=place(request.out))
        _check(request)
        with Console(stderr=True).status("predicting"):
            rows = _predicted(request)
    if len(rows) == 1:
        console.print(str(rows[0].picture), markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows))
    if request.out is not None:
        with reported("trace"):
            make_folder(request.out)
            _write(rows, request.out)
        console.print(f"saved: {request.out}", markup=False, highlight=False, soft_wrap=True)


def _check(request: TraceArguments) -> None:
    if request.pipe is not None and (request.forward or request.backward):
        raise GraphOptError(
            "--forward and --backward do not go with a pipe: its stages are measured"
        )
    if _is_file(request) and (request.ranks or request.stages):
        raise GraphOptError("--ranks and --stages do not go with a file of actions: it has its own")


def _is_file(request: TraceArguments) -> bool:
    return request.schedule.endswith(".csv")


# ---------------------------------------------------------------------------- predicted


def _predicted(request: TraceArguments) -> list[SchedulePicture]:
    durations = _Durations(request)
    if _is_file(request):
        order = ScheduleOrder.from_csv(request.schedule)
        return [_row(order, durations.of(order.num_ranks, order.num_stages), request)]
    if request.schedule != "all":
        return [_named(find_schedule(request.schedule), durations, request)]
    rows = [_named_or_reason(kind, durations, request) for kind in SCHEDULES.values()]
    if not any(row.picture for row in rows):
        raise ScheduleError("\n".join(dict.fromkeys(row.reason for row in rows)))
    return rows


def _named_or_reason(
    kind: ScheduleKind, durations: _Durations, request: TraceArguments
) -> SchedulePicture:
    try:
        return _named(kind, durations, request)
    except ScheduleError as error:
        return SchedulePicture(kind.name, reason=str(error))


def _named(kind: ScheduleKind, durations: _Durations, request: TraceArguments) -> SchedulePicture:
    ranks, stages = _layout(kind, request.ranks, durations.stages)
    order = ScheduleOrder.named(kind.name, ranks, stages, request.microbatches)
    return _row(order, durations.of(ranks, stages), request)


def _row(
    order: ScheduleOrder, durations: StageDurations, request: TraceArguments
) -> SchedulePicture:
    picture = predict_schedule(order, durations, transfer=request.transfer)
    return SchedulePicture(order.name, order.num_stages, picture)


def _layout(kind: ScheduleKind, ranks: int | None, stages: int | None) -> tuple[int, int]:
    """The numbers of ranks and stages, with defaults for those left out."""
    usual = kind.usual_stages
    if stages is None:
        ranks = _USUAL_RANKS if ranks is None else ranks
        stages = ranks * usual
    if ranks is None:
        ranks = max(1, stages // usual)
    kind.check(ranks, stages)
    return ranks, stages


class _Durations:
    """The durations of stages: given, or measured once for each number of stages.

    Attributes:
        stages: the required number of stages, None if it is free.
    """

    def __init__(self, request: TraceArguments) -> None:
        self._request = request
        self._source = None if request.pipe is None else PipeSource(request.pipe)
        self._known: dict[tuple[int, int], StageDurations] = {}
        self.stages = request.stages
        lists = [len(s) for s in (request.forward, request.backward) if s and len(s) > 1]
        if self.stages is None and lists:
            self.stages = lists[0]
        if self._source is not None and not self._source.any_stages:
            self.stages = self._source.make(request.stages).num_stages

    def of(self, ranks: int, stages: int) -> StageDurations:
        if (ranks, stages) not in self._known:
            self._known[ranks, stages] = self._find(ranks, stages)
        return self._known[ranks, stages]

    def _find(self, ranks: int, stages: int) -> StageDurations:
        if self._source is not None:
            with _threads(threads_per_rank(ranks)):
                return measure_durations(self._source.make(stages))
        return StageDurations.given(
            _of_each_stage(self._request.forward or _FORWARD, ranks, stages),
            _of_each_stage(self._request.backward or _BACKWARD, ranks, stages),
        )


def _of_each_stage(seconds: tuple[float, ...], ranks: int, stages: int) -> tuple[float, ...]:
    """The seconds of each stage; one number is a rank's time, divided among its stages."""
    return seconds if len(seconds) > 1 else (seconds[0] * ranks / stages,) * stages


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """While active, torch uses as many threads as one of `number` ranks would."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------- shown and saved


def _table(rows: Sequence[SchedulePicture]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for heading in ("ranks", "stages", "step", "bubble"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(row.reason for row in rows):
        table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(row.name, *_cells(row), escape(row.reason))
    return table


def _cells(row: SchedulePicture) -> list[str]:
    picture = row.picture
    if picture is None:
        return [""] * 4
    figures = [seconds_text(picture.step_seconds), percent(picture.bubble_share)]
    return [str(picture.num_ranks), str(row.stages), *figures]


def _write(rows: Sequence[SchedulePicture], out: Path) -> None:
    pictures = {row.name: row.picture for row in rows if row.picture is not None}
    for name, picture in pictures.items():
        picture.save_chrome_trace(out / f"{name}.predicted.json")
        picture.to_html(out / f"{name}.html")
    if len(rows) > 1:
        every: list[Any] = list(pictures.values())
        write(out / "schedules.html", schedules_page(every))
