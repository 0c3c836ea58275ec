"""`schedule[step]`: an item of a list or an array that a number of the call selects.

The item is found before the graph runs, in every call, where the step finds it:

    rates = numpy.linspace(0.1, 0.001, 1000)        read as it is when a call begins
    group["lr"] = rates[iteration]                  a number that the graph takes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from graphopt.tracing.draws.arguments import Known, any_known
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.number_expressions import Application


class LiveItems:
    """Gives a container of the program's as it is then.

    Args:
        container: a list, a tuple or a numpy array.
    """

    def __init__(self, container: Any) -> None:
        self.container = container

    def __call__(self) -> Any:
        return self.container

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveItems) and other.container is self.container

    def __hash__(self) -> int:
        return id(self.container)


class SelectedItems:
    """Stands for a container where an instruction takes an item out of it, and for
    `operator.getitem` where that is called.

    Args:
        calls: makes what is computed before the graph runs.
        container: the list, tuple or array.
        lives: it was there before the step, which has not changed it.
    """

    def __init__(self, calls: HostCalls, container: Any, lives: bool) -> None:
        self._calls, self._given = calls, container
        if lives:
            self._given = Known(Application(LiveItems(container), ()), container)

    def __getitem__(self, key: Any) -> Any:
        return self._calls.item(self._given, key)

    def __call__(self, container: Any, key: Any) -> Any:
        return self[key]


def selects(args: Sequence[Any]) -> bool:
    """Whether the arguments of `operator.getitem` are a container of numbers and a number, or for
    an array also a slice or several of these, that is known before the graph runs."""
    container, key = args
    if not any_known(key if type(key) is tuple else (key,)):
        return False
    if type(container) in (list, tuple):
        return is_host_number(key) and bool(container) and all(map(_is_number, container))
    return is_numeric(container)


def is_numeric(value: Any) -> bool:
    """Whether a value is an array of numbers, in memory or in a file."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) not in (numpy.ndarray, numpy.memmap):
        return False
    return value.dtype.kind in _KINDS


_KINDS = "biuf"
"""Truths, integers and floats of any width."""


def _is_number(item: Any) -> bool:
    return type(item) in (int, float) or is_host_number(item)
