"""What one rank traces of a call while the others trace it, too."""

from __future__ import annotations

import copy
from collections.abc import Collection

from graphopt.errors import CaptureError
from graphopt.host.used import Used
from graphopt.tracing.call import Call
from graphopt.tracing.capture import first_trace, retried
from graphopt.tracing.decisions import OwnDecisionError
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import MoreInputs
from graphopt.tracing.reduction import MarkedCommunication
from graphopt.tracing.trace import RawTrace


def voting(call: Call, *, always: bool) -> Call:
    """A call in which all ranks say whether what their graphs assume holds.

    Args:
        always: of each decision, also by what begins alike on all ranks.
    """
    new = copy.copy(call)
    new.votes, new.votes_always = True, always
    return new


def retried_voting(call: Call, inputs: Inputs, error: MoreInputs | CaptureError) -> Call:
    """`retried`; where what decides turns out to be a rank's own, with votes on each decision."""
    if not isinstance(error, OwnDecisionError) or not call.votes or call.votes_always:
        return retried(call, inputs, error)
    return voting(call, always=True)


def first_joint_trace(
    call: Call, communication: MarkedCommunication | None
) -> tuple[Call, Inputs, RawTrace]:
    """`first_trace`, in which nothing is known of what others use, nor asked."""
    decided = call.decided
    known = tuple(answer for answer in decided if not isinstance(answer, Used))
    call, inputs, raw = first_trace(call.with_answers(known), communication)
    if len(known) < len(decided):
        inputs.answers[: len(known)] = decided
        call = call.with_answers((*decided, *call.decided[len(known) :]))
    return call, inputs, raw


def left_out(call: Call, inputs: Inputs, order: Collection[str]) -> list[str]:
    """Parameters that no rank uses, of modules of which ranks use others: some may come to use them
    in another call."""
    entries = {id(entry.tensor): entry.fqn for entry in inputs.parameters}
    names_left = []
    for _, root in call.named_roots():
        parameters = [p for p in root.parameters() if p.requires_grad and id(p) in entries]
        names = [entries[id(parameter)] for parameter in parameters]
        if any(name in order for name in names):
            names_left += [name for name in names if name not in order]
    return names_left
