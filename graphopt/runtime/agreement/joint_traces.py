"""The trace of a call on one rank, while other ranks trace it as well."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from graphopt.host.decisions.assumptions import Assumption, assumptions
from graphopt.host.decisions.used import UsedParameters
from graphopt.tracing.call import Call
from graphopt.tracing.capture import trace_from_state
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.optimizers.beforehand import with_state_used
from graphopt.tracing.optimizers.new_state import NewState
from graphopt.tracing.ranks.reduction import MarkedCommunication
from graphopt.tracing.trace import RawTrace, trace


def first_joint_trace(
    call: Call, communication: MarkedCommunication | None, *, beforehand: bool
) -> tuple[Call, RawTrace, NewState]:
    """A first trace without knowledge of the parameters that other ranks use.

    Args:
        beforehand: state that optimizers make in their first step is made before it is traced.
    """
    decided = call.decided
    known = tuple(answer for answer in decided if not isinstance(answer, UsedParameters))
    call, raw, made = trace_from_state(call.with_answers(known), communication, lasts=beforehand)
    if len(known) < len(decided):
        raw.inputs.answers[: len(known)] = decided
        call = call.with_answers((*decided, *call.decided[len(known) :]))
    return call, raw, made


def trace_in_order(
    call: Call,
    raw: RawTrace,
    made: NewState,
    communication: MarkedCommunication | None,
    order: Sequence[str],
) -> tuple[RawTrace, NewState] | None:
    """The trace in which gradients are averaged in the order that the ranks have agreed on; None
    where it does not use the state that was made beforehand.

    Args:
        raw: the first trace, which is that one where it has averaged in this order.
        made: is there.
    """
    agreed = None if communication is None else communication.agreed
    every_round = agreed is not None and agreed.every_round
    if tuple(order) == tuple(raw.used) and not every_round:
        return raw, made
    again = trace(call, raw.inputs, communication)
    return with_state_used(call, made, again) if made else (again, made)


def left_out(call: Call, inputs: Inputs, order: Collection[str]) -> list[str]:
    """The parameters of partly used modules that no rank uses now, but some rank may in another
    call."""
    entries = {id(entry.tensor): entry.fqn for entry in inputs.parameters}
    names_left = []
    for _, root in call.named_roots():
        parameters = [p for p in root.parameters() if p.requires_grad and id(p) in entries]
        names = [entries[id(parameter)] for parameter in parameters]
        if any(name in order for name in names):
            names_left += [name for name in names if name not in order]
    return names_left


def trained(call: Call, inputs: Inputs, used: Collection[str]) -> list[str]:
    """The parameters that this rank may use after another decision: those of partly used
    modules, and those of its optimizers."""
    entries = {id(entry.tensor): entry.fqn for entry in inputs.parameters}
    groups = (group for optimizer in call.optimizer_objects() for group in optimizer.param_groups)
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    parameters = [e.tensor for e in inputs.parameters if id(e.tensor) in updated]
    names = [entries[id(parameter)] for parameter in parameters if parameter.requires_grad]
    return [*left_out(call, inputs, used), *names]


def decisions(raw: RawTrace) -> tuple[int, bool]:
    """The number of uniform decisions in a trace, and whether it takes others."""
    targets = [node.target for node in raw.graph_module.graph.nodes]
    found = [each for each in targets if isinstance(each, Assumption)]
    own = [each for each in found if each.alone and not isinstance(each.answer, UsedParameters)]
    return sum(not each.alone for each in found), bool(own)


def outcomes(graph: fx.Graph) -> list[tuple[str, str]]:
    """The line and outcome of each decision by value in a graph."""
    found = (node.target for node in assumptions(graph))
    taken = (each for each in found if isinstance(each, Assumption))
    return [
        (each.line, repr(each.answer))
        for each in taken
        if not isinstance(each.answer, UsedParameters)
    ]
