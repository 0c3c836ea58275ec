"""Pipeline timelines as one self-contained HTML page: a lane and a table row for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphopt.pipelining.timeline.slots import KIND_NAMES, RankFigures, ScheduleTimes
from graphopt.pipelining.timeline.terminal_picture import percent, seconds_text, summary
from graphopt.readable.html_page import lanes_page

_COLOURS = {"F": "forward", "B": "backward", "I": "hidden", "W": "optimizer"}
_HEADS = ("schedule", "rank", "stages", "busy", "idle", "bubble share", *KIND_NAMES.values())


def schedules_page(schedules: Sequence[ScheduleTimes]) -> str:
    """The HTML page of several schedules, all on one scale of time. A block shows its
    microbatch, with a prime for each stage of the rank before its own."""
    title = ", ".join(dict.fromkeys(times.schedule for times in schedules))
    return lanes_page(
        f"Pipeline schedules: {title}",
        "; ".join(map(_figures, schedules)),
        [lane for times in schedules for lane in _lanes(times)],
        table="ranks",
        heads=_HEADS,
        rows=[_row(times, figures) for times in schedules for figures in times.ranks],
    )


def _figures(times: ScheduleTimes) -> str:
    unequal = times.imbalance_share
    of_it = f" ({percent(unequal)} as ranks have unequal work)" if unequal >= 0.0005 else ""
    return summary(times) + of_it


def _lanes(times: ScheduleTimes) -> Iterator[dict[str, Any]]:
    for figures, slots in zip(times.ranks, times.by_rank, strict=True):
        local = {stage: index for index, stage in enumerate(figures.stages)}
        blocks = [
            [
                _COLOURS[slot.kind],
                slot.start - times.start,
                slot.seconds,
                f"{slot.action}: {KIND_NAMES[slot.kind]} of microbatch {slot.microbatch} in stage"
                f" {slot.stage}, rank {slot.rank}\n{seconds_text(slot.start - times.start)} to"
                f" {seconds_text(slot.end - times.start)}: {seconds_text(slot.seconds)}",
                None,
                f"{slot.microbatch}{chr(0x2032) * local[slot.stage]}",
            ]
            for slot in slots
        ]
        yield {"name": f"{figures.rank} {times.schedule}", "blocks": blocks}


def _row(times: ScheduleTimes, figures: RankFigures) -> list[str]:
    return [
        times.schedule,
        str(figures.rank),
        ", ".join(map(str, figures.stages)),
        *map(seconds_text, (figures.busy, figures.idle)),
        percent(figures.bubble_share),
        *(seconds_text(figures.by_kind.get(kind, 0.0)) for kind in KIND_NAMES),
    ]
