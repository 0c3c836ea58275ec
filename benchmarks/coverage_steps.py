"""Step times of a case of the coverage set after all captures.

eager      ▐███▌            ▐███▌               a turn: all calls of one loop, one after another as
graphopt        ▐███▌            ▐███▌          in training, then those of the others: whatever
torch                ▐███▌            ▐███▌     disturbs the machine disturbs all of them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from cases import Build, Case
from torch.utils._pytree import tree_leaves, tree_map_only

import graphopt


def step_times(build: Build, steps: int, backend: str | None) -> dict[str, float]:
    """Times all ways to run a case, in turns; returns what `Outcome` says of later steps.

    Args:
        build: makes the case, from the same seed each time.
        steps: the number of steps of each way, in all turns, of which there are at least 3.
        backend: the backend of `torch.compile`; None: without it.
    """
    case, captured = build(), build()
    loops = {
        "eager": turns_of(case, case.step),
        "step": turns_of(captured, graphopt.compile(captured.step)),
    }
    theirs = None if backend is None else turns_of_torch(build(), backend)
    if theirs is not None:
        loops["torch"] = theirs
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(max(3, steps // len(case.calls))):
        names = list(loops)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(next(loops[name]))
    eager = seconds.pop("eager")
    ratios = {
        f"{name}_ratio": median(a / b for a, b in zip(found, eager, strict=True))
        for name, found in seconds.items()
    }
    return {"eager_step": median(eager), **ratios}


def turns_of(
    case: Case, step: Callable[..., Any], models: Callable[[Any], Any] = lambda args: args
) -> Iterator[float]:
    """The mean CPU seconds of a loop's calls in each turn; it starts over after its last batch.

    Args:
        models: replaces the models among the arguments of a call.
    """
    calls = [models(args) for args in case.calls]

    def turns() -> Iterator[float]:
        for turn in count():
            seconds = 0.0
            for number, args in enumerate(calls, turn * len(calls)):
                begin = time.process_time()
                result = step(*args)
                seconds += time.process_time() - begin
                if case.after is not None:
                    case.after(number, result)
            yield seconds / len(calls)

    found = turns()
    for _ in range(2):  # what the first calls leave may need a graph of its own
        next(found)
    return found


def turns_of_torch(case: Case, backend: str) -> Iterator[float] | None:
    """The turns of a case whose models torch compiles; None where it has none, or torch fails."""
    if not any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(case.calls[0])):
        return None
    compiled: dict[torch.nn.Module, Any] = {}

    def of_torch(model: torch.nn.Module) -> Any:
        return compiled.setdefault(model, torch.compile(model, backend=backend))

    try:
        return turns_of(case, case.step, partial(tree_map_only, torch.nn.Module, of_torch))
    except Exception as error:
        print(f"    torch.compile: {type(error).__name__}", flush=True)
        return None
