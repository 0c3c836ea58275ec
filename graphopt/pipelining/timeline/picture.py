"""The predicted timeline of a pipeline schedule, as text for a terminal or as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from graphopt.ir.user_files import place, write
from graphopt.pipelining.timeline.slots import KIND_NAMES, ScheduleTimes, Slot
from graphopt.readable.trace_events import TraceEvent, trace_text

_COLUMNS = 96
_LEGEND = "  F forward, B backward, I input gradients, W weight gradients"


class ScheduleTimeline(ScheduleTimes):
    """A schedule over time, with its bubble share; `str` of it is a picture for a terminal.

    In the picture, letters stand for what a rank runs and dots for idle time. Microbatches take
    turns in capitals and small letters, so that neighbours can be told apart. Made by
    `predict_schedule`; `ScheduleTimes` has the figures.
    """

    def save_chrome_trace(self, path: str | Path) -> None:
        """Writes a trace for ui.perfetto.dev, chrome://tracing or `graphopt view`: a lane for each
        rank.

        Raises:
            FileError: the file cannot be written.
        """
        lanes = {
            f"rank {figures.rank}: stage{'s' * (len(figures.stages) > 1)} "
            + ", ".join(map(str, figures.stages)): self._events(slots)
            for figures, slots in zip(self.ranks, self.by_rank, strict=True)
        }
        about = {
            "schedule": self.schedule,
            "step_seconds": self.step_seconds,
            "bubble_share": self.bubble_share,
        }
        write(place(path), trace_text(lanes, about))

    def _events(self, slots: tuple[Slot, ...]) -> Iterator[TraceEvent]:
        for slot in slots:
            facts = {"stage": slot.stage, "microbatch": slot.microbatch}
            kind = KIND_NAMES[slot.kind]
            yield TraceEvent(str(slot.action), slot.start - self.start, slot.seconds, kind, facts)

    def __str__(self) -> str:
        head = (
            f"{self.schedule}, predicted: {self.num_ranks} ranks, {self.microbatches}"
            f" microbatches, step {seconds_text(self.step_seconds)}, bubble share"
            f" {percent(self.bubble_share)}"
        )
        columns = self._columns()
        rows = [
            f"  rank {rank.rank:<2} |{self._row(slots, columns)}| {rank.bubble_share:6.1%} idle"
            for rank, slots in zip(self.ranks, self.by_rank, strict=True)
        ]
        return "\n".join([head, *rows, _LEGEND])

    def _columns(self) -> int:
        """The picture's width in characters: one for each of the shortest slots, if they fit."""
        shortest = min((slot.seconds for slot in self.slots if slot.seconds), default=0.0)
        if not shortest:
            return 1
        return max(1, min(_COLUMNS, round(self.step_seconds / shortest)))

    def _row(self, slots: tuple[Slot, ...], columns: int) -> str:
        row = ["."] * columns
        scale = columns / self.step_seconds if self.step_seconds else 0.0
        for slot in slots:
            first, last = (round((t - self.start) * scale) for t in (slot.start, slot.end))
            letter = slot.kind if slot.microbatch % 2 == 0 else slot.kind.lower()
            row[first:last] = letter * (last - first)
        return "".join(row)


def percent(share: float) -> str:
    """A share as text, such as `27.3 %`."""
    return f"{100 * share:.1f} %"


def seconds_text(seconds: float) -> str:
    """A duration as text with four digits, in s, ms or µs."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if not seconds or seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"
