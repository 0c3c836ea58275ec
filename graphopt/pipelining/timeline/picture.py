"""The predicted timeline of a schedule, printed or saved as a picture."""

from __future__ import annotations

from pathlib import Path

from graphopt.pipelining.timeline.chrome import chrome_trace
from graphopt.pipelining.timeline.pages import schedules_page
from graphopt.pipelining.timeline.slots import ScheduleTimes
from graphopt.pipelining.timeline.terminal_picture import terminal_picture
from graphopt.runtime.places import place, write


class ScheduleTimeline(ScheduleTimes):
    """A schedule over time, with its bubble share; `str` of it is a picture for a terminal.

    Made by `predict_schedule`. `ScheduleTimes` has the figures.
    """

    def save_chrome_trace(self, path: str | Path) -> None:
        """Writes JSON for ui.perfetto.dev or chrome://tracing: a row for each rank.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), chrome_trace(self))

    def to_html(self, path: str | Path) -> None:
        """Writes one self-contained HTML file: a picture and a table of figures.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), schedules_page([self]))

    def __str__(self) -> str:
        return terminal_picture(self)
