"""Runs the coverage set's cases with `torch.compile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from cases import Build, Case
from coverage_outcomes import Outcome
from torch.utils._pytree import tree_leaves, tree_map_only

New = Callable[[Build], Case]
"""Makes a case from its seed."""


def first_of_torch(name: str, build: Build, new: New, backend: str) -> Outcome:
    """The seconds of the first call with `torch.compile`."""
    return Outcome(name, "torch", against=seconds_of_torch(new(build), backend))


def seconds_of_torch(case: Case, backend: str) -> float | None:
    """The CPU seconds of the first call of a case whose models torch compiles; None without
    models among its arguments, and where torch fails."""
    if not has_models(case.calls[0]):
        return None
    begin = time.process_time()
    try:
        case.step(*_compiled(case.calls[0], backend=backend))
    except Exception as error:
        print(f"    torch.compile: {type(error).__name__}", flush=True)
        return None
    return time.process_time() - begin


def whole_by_torch(name: str, build: Build, new: New) -> Outcome:
    """True for a step that `torch.compile(fullgraph=True)` takes as one graph, with backward
    tracing, and True if it takes each of the step's models so."""
    case = new(build)
    step = torch.compile(case.step, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        outcome = Outcome(name, "torch", whole_step=_runs(step, case.calls))
    torch.compiler.reset()
    case = new(build)
    if has_models(case.calls[0]):
        given = [_compiled(args, backend="eager", fullgraph=True) for args in case.calls]
        outcome.whole_models = _runs(case.step, given)
    return outcome


def has_models(args: Any) -> bool:
    return any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(args))


def _compiled(args: Any, **options: Any) -> Any:
    return tree_map_only(torch.nn.Module, partial(torch.compile, **options), args)


def _runs(step: Callable[..., Any], calls: Sequence[Any]) -> bool:
    try:
        for args in calls:
            step(*args)
    except Exception:
        return False
    return True
