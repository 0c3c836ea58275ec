"""A schedule as stages over time, with its bubble share."""

from __future__ import annotations

from pathlib import Path

from graphopt.pipelining.timeline.chrome import chrome_trace
from graphopt.pipelining.timeline.html import page
from graphopt.pipelining.timeline.slots import ScheduleTimes
from graphopt.pipelining.timeline.text import terminal_picture


class ScheduleTimeline(ScheduleTimes):
    """When each rank of a schedule ran, or would run, what. `str` of it is for a terminal.

    Made by `predict_schedule` and `record_schedule`. `ScheduleTimes` has the figures.
    """

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write JSON for ui.perfetto.dev or chrome://tracing: a row for each rank."""
        Path(path).write_text(chrome_trace(self))

    def to_html(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing else: a picture and a table of figures."""
        Path(path).write_text(page([self]), encoding="utf-8")

    def __str__(self) -> str:
        return terminal_picture(self)
