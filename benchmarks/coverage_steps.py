"""Step times of a case of the coverage set after all captures.

eager      ▐███▌            ▐███▌               a turn: all calls of one loop, one after another as
graphopt        ▐███▌            ▐███▌          in training, then those of the others: whatever
torch                ▐███▌            ▐███▌     disturbs the machine disturbs all of them
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from cases import Build, Case
from torch.utils._pytree import tree_leaves, tree_map_only

import graphopt


@dataclass
class StepTimes:
    """The median step times of one case.

    Attributes:
        eager: CPU seconds of an eager call.
        ratio: the ratio of the captured step's turn to the eager turn beside it.
        torch: of a turn with models compiled by torch to the eager turn beside it; None where that
            fails, where no model is an argument, and where it was not asked for.
    """

    eager: float
    ratio: float
    torch: float | None = None


class Loop:
    """A training loop that starts over after its last batch."""

    def __init__(self, case: Case, step: Callable[..., Any], models: Callable[[Any], Any]) -> None:
        self._after, self._step = case.after, step
        self._calls = [models(args) for args in case.calls]
        self._numbers = count()
        for _ in range(2):  # what the first calls leave may need a graph of its own
            self.turn()

    def turn(self) -> float:
        """The mean CPU seconds of the loop's calls."""
        return sum(self._seconds() for _ in self._calls) / len(self._calls)

    def turns(self, steps: int) -> int:
        """The number of turns with that many calls in all, at least 3."""
        return max(3, steps // len(self._calls))

    def _seconds(self) -> float:
        """The CPU seconds of the next call."""
        number = next(self._numbers)
        args = self._calls[number % len(self._calls)]
        begin = time.process_time()
        result = self._step(*args)
        seconds = time.process_time() - begin
        if self._after is not None:
            self._after(number, result)
        return seconds


def step_times(build: Callable[[], Case], steps: int, backend: str | None) -> StepTimes:
    """Times all ways to run a case, in turns.

    Args:
        build: makes the case, from the same seed each time.
        steps: the number of steps of each way, in all turns.
        backend: the backend of `torch.compile`; None: without it.
    """
    loops = {"eager": _loop(build), "graphopt": _loop(build, compiled=True)}
    if backend is not None:
        theirs = _loop_of_torch(build, backend)
        loops |= {} if theirs is None else {"torch": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(loops["eager"].turns(steps)):
        names = list(loops)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(loops[name].turn())
    eager = seconds["eager"]
    ratios = {
        name: median(a / b for a, b in zip(found, eager, strict=True))
        for name, found in seconds.items()
    }
    return StepTimes(median(eager), ratios["graphopt"], ratios.get("torch"))


def _loop(build: Callable[[], Case], compiled: bool = False) -> Loop:
    case = build()
    return Loop(case, graphopt.compile(case.step) if compiled else case.step, lambda args: args)


def _loop_of_torch(build: Build, backend: str) -> Loop | None:
    case = build()
    if not any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(case.calls[0])):
        return None
    compiled: dict[torch.nn.Module, Any] = {}

    def of_torch(model: torch.nn.Module) -> Any:
        return compiled.setdefault(model, torch.compile(model, backend=backend))

    try:
        return Loop(case, case.step, partial(tree_map_only, torch.nn.Module, of_torch))
    except Exception as error:
        print(f"    torch.compile: {type(error).__name__}", flush=True)
        return None
