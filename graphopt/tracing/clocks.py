"""Clocks that the step's own code reads: `time.time()`, `datetime.now()`, `time.ctime()`.

What they show is a number of the graph, read in each call; dates and texts are made of it when the
graph has run.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from graphopt import _compat
from graphopt.host.clock import ClockReading
from graphopt.tracing.later import applied
from graphopt.tracing.later_values import holds_unknown
from graphopt.tracing.numbers import as_read
from graphopt.tracing.running_trace import current_trace

_FLOATS = (time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time)
_INTEGERS = (time.time_ns, time.perf_counter_ns, time.monotonic_ns, time.process_time_ns)
_DATES: dict[tuple[Any, str], Callable[..., Any]] = {
    (datetime.datetime, "now"): datetime.datetime.fromtimestamp,
    (datetime.datetime, "today"): datetime.datetime.fromtimestamp,
    (datetime.datetime, "utcnow"): datetime.datetime.utcfromtimestamp,
    (datetime.date, "today"): datetime.date.fromtimestamp,
}
"""What makes of a time what these methods give now."""
_FORMATTED = (time.ctime, time.asctime, time.strftime)
_OF_TIMES = (*_DATES.values(), *_FORMATTED, time.localtime, time.gmtime, datetime.timedelta)
_TIMES_OF_NOW: dict[Any, int] = {
    **dict.fromkeys((time.ctime, time.asctime, time.localtime, time.gmtime), 0),
    time.strftime: 1,
}
"""Functions that take the time of now where it is not given, and how much else they take."""


class Clocks:
    """The clocks of one trace.

    Args:
        mode: in which the trace computes.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def asked(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function that reads a clock, or makes a date or a text of a
        time of the graph's; None where it does neither.

        Args:
            args: positional values, and those of keywords.
        """
        if not _is_of_times(callee):
            return None
        for clocks, read in ((_FLOATS, self._float), (_INTEGERS, self._integer)):
            if callee in clocks:
                return functools.partial(read, callee)
        date = _DATES.get((getattr(callee, "__self__", None), callee.__name__))
        if date is not None:
            return lambda *zone, **named: applied(date, (self._now(), *zone), named)
        if len(args) == _TIMES_OF_NOW.get(callee, -1):
            return functools.partial(self._of_now, callee)
        if callee in _OF_TIMES and any(holds_unknown(arg, of_host=True) for arg in args):
            return lambda *given, **named: _made(callee, applied(callee, given, named))
        return None

    def _of_now(self, function: Callable[..., Any], *form: str) -> Any:
        if function in (time.strftime, time.asctime):
            now = applied(time.localtime, (self._now(),), {})
        else:
            now = self._now()
        return _made(function, applied(function, (*form, now), {}))

    def _now(self) -> Any:
        return self._float(time.time)

    def _float(self, clock: Callable[[], Any]) -> Any:
        return as_read(_compat.record_clock(self._mode, ClockReading(clock), integer=False))

    def _integer(self, clock: Callable[[], Any]) -> Any:
        return as_read(_compat.record_clock(self._mode, ClockReading(clock), integer=True))


def _is_of_times(callee: Any) -> bool:
    owner = getattr(callee, "__self__", None)
    of_dates = owner is datetime.datetime or owner is datetime.date
    return owner is time or of_dates or callee is datetime.timedelta


def _made(function: Callable[..., Any], value: Any) -> Any:
    return current_trace().text(value) if function in _FORMATTED else value
