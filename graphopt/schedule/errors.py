"""What is wrong with a schedule."""

from __future__ import annotations

from graphopt.errors import GraphOptError


class ScheduleError(GraphOptError, ValueError):
    """An order that a graph cannot have, or a graph whose order cannot be changed.

    >>> from graphopt.schedule import ScheduleError
    >>> issubclass(ScheduleError, graphopt.GraphOptError)
    True
    """
