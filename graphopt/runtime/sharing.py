"""How graphs of one step that part at decisions go together: which is tried first, and what they
share that is computed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphopt._compat.late import without_torch_function
from graphopt.runtime.bound_step import BoundStep, Tries
from graphopt.runtime.branch import Begun, Left
from graphopt.tracing.call import Call


def in_order(entries: Sequence[BoundStep], retried: Tries | None) -> list[BoundStep]:
    """The graphs of a step as a call tries them. Graphs of one branch stand where that of them
    stands which was used last: all ranks try the same branches, whatever graphs they have.

    Args:
        entries: those used last first.
        retried: of the branch that is tried before all others.
    """
    places: dict[Tries, int] = {}
    for entry in entries:
        places.setdefault(entry.tries, len(places))
    found = sorted(entries, key=lambda entry: (entry.tries is not retried, places[entry.tries]))
    for entry in reversed(found):
        if entry.agreed is not None:
            entry.agreed.likely = entry.uniform
    return found


def join_branch(entry: BoundStep, entries: Sequence[BoundStep]) -> None:
    """Let a new graph count as one of its branch, of which others hold for other arguments, or for
    other decisions that this rank takes alone: all ranks try the same branches."""
    for other in entries:
        together = entry.agreed is not None and other.agreed is entry.agreed
        if together and other.uniform == entry.uniform:
            entry.tries = other.tries


def begun(
    left: Left, by: BoundStep, other: BoundStep | None, call: Call, step: int
) -> Begun | None:
    """How another graph goes on in a call in which an assumption has failed; None: it begins from
    the beginning, as on all other ranks then.

    Args:
        left: what is there.
        by: the graph that left it.
        other: None: it is still to be captured.
        call: with its decisions.
        step: which call of the training step it is, counted from 1.
    """
    found = None
    if other is not None:
        bound = call.using(other.captured.besides) or call
        with without_torch_function():  # to look at tensors is no use of them
            found = left.begun(other.branch, lambda: other.values(bound))
    left.handed_out = ()
    if by.agreed is None:
        return found
    plan = 0 if found is None else found.branch.plan
    return found if by.agreed.votes.alike(plan, step) else None


def learn(left: Left, by: BoundStep, other: BoundStep, make_ready: Callable[..., None]) -> None:
    """Find out how `other` goes on in later calls that are left so.

    Args:
        left, by: as of `begun`.
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
