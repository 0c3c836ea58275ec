"""The timeline that `graphopt.simulate` returns: a simulated step that can be drawn."""

from __future__ import annotations

from os import PathLike

from graphopt.ir.user_files import place, write
from graphopt.schedule.pictures import chrome_trace, page
from graphopt.schedule.simulated_step import SimulatedStep


class Timeline(SimulatedStep):
    """The predicted timeline of a step in the steady state, returned by `graphopt.simulate`.

    >>> timeline = graphopt.simulate(gm)
    >>> timeline.step_seconds >= timeline.compute_seconds
    True
    """

    def save_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Writes the step in the trace event format, for Perfetto or ``chrome://tracing``.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), chrome_trace(self))

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained page: lanes, and a table of the collectives.

        Raises:
            FileError: the file cannot be written.
        """
        write(place(path), page(self))
