"""Coordination of a step's graphs for different branches: their order, and computed values that
they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphopt._compat.tensor_classes import without_torch_function
from graphopt.branches.branch import ResumedCall, ResumePoint
from graphopt.runtime.bound_step import BoundStep, BranchFailures
from graphopt.tracing.call import Call


def in_order(entries: Sequence[BoundStep], retried: BranchFailures | None) -> list[BoundStep]:
    """The graphs of a step in the order in which a call tries them; graphs of one branch are
    adjacent, so that all ranks try the same branches.

    Args:
        entries: the graphs, most recently used first.
        retried: the history of the branch that is tried before all others.
    """
    if len(entries) == 1 and entries[0].agreed is None:
        return list(entries)
    places: dict[BranchFailures, int] = {}
    for entry in entries:
        places.setdefault(entry.tries, len(places))
    found = sorted(entries, key=lambda entry: (entry.tries is not retried, places[entry.tries]))
    for entry in reversed(found):
        if entry.agreed is not None:
            entry.agreed.likely = entry.uniform
    return found


def join_branch(entry: BoundStep, entries: Sequence[BoundStep]) -> None:
    """Assigns a new graph to the branch of an existing one with the same uniform decisions: all
    ranks try the same branches."""
    for other in entries:
        together = entry.agreed is not None and other.agreed is entry.agreed
        if together and other.uniform == entry.uniform:
            entry.tries = other.tries


def begun(
    left: ResumePoint, by: BoundStep, other: BoundStep | None, call: Call, step: int
) -> ResumedCall | None:
    """The continuation in another graph after an assumption failed, or None to start from the
    beginning on all ranks.

    Args:
        left: the values that the failed graph has computed.
        by: the graph that left it.
        other: None: it is still to be captured.
        call: with its decisions.
        step: the number of the training step's call, counted from 1.
    """
    found = None if other is None else left.branch.onward(left.index, other.branch)
    if found is not None and other is not None:
        bound = call.using(other.captured.besides) or call
        with without_torch_function():  # to look at tensors is no use of them
            found = found if found.fits(left.flat, other.values(bound)) else None
    there = [] if found is None else [left.handed_out[position] for position in found.positions]
    left.handed_out = ()
    plan = 0 if found is None else found.plan
    agreed = by.agreed is None or by.agreed.votes.alike(plan, step)
    return None if found is None or not agreed else ResumedCall(found, there, left)


def learn(
    left: ResumePoint, by: BoundStep, other: BoundStep, make_ready: Callable[..., None]
) -> None:
    """Builds a graph that continues the branch `other` from the values of a failed call, for later
    calls.

    Args:
        left, by: see `begun`.
        make_ready: the stages behind the passes, for a module and what the ranks agree on.
    """
    if by.agreed is not other.agreed or not (_runs_again(by) and _runs_again(other)):
        return
    if by.agreed is None and (by.groups or other.groups):
        return  # other ranks may do something else
    agreement = by.agreed.agreement if by.agreed else None
    left.branch.learn(left.index, other.branch, lambda module: make_ready(module, agreement))
    by.captured.graph_module = by.module


def _runs_again(entry: BoundStep) -> bool:
    return not entry.captured.signature.states
