"""Clocks that a step reads, as nodes of its graph: read in each call, where the program does.

    start = time.perf_counter()          perf_counter = graphopt.clock()
    loss = model(x)                ==>   …
    self.seconds += time.perf_counter() - start

What a clock shows is a number of the graph, as what `.item()` gives is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class ClockReading:
    """The target of a node that reads a clock. No two nodes have the same one: each reads for
    itself.

    Args:
        clock: a function of `time` without arguments that gives a number.
    """

    def __init__(self, clock: Callable[[], Any]) -> None:
        self.clock = clock
        # fx names nodes and writes code by these.
        self.__name__ = self.__qualname__ = clock.__name__
        self.__module__ = "graphopt"

    def __call__(self) -> Any:
        return self.clock()

    def repeats(self, other: ClockReading) -> bool:
        """Whether another trace of the same step has read the same clock."""
        return self.clock is other.clock

    def __repr__(self) -> str:
        return f"graphopt.clock({self.__name__})"


def reads_clock(node: fx.Node) -> bool:
    """Whether a node reads a clock, which shows another time on each rank."""
    return isinstance(node.target, ClockReading)
