"""The trace of a call on one rank, while other ranks trace it as well."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from torch import fx

from graphopt.errors import CaptureError
from graphopt.host.decisions.assumptions import Assumption, assumptions, uniform_answers
from graphopt.host.decisions.used import UsedParameters
from graphopt.host.votes import decides_alone
from graphopt.parallel import OverRanks
from graphopt.runtime.agreement.agreed import CallCapture, Plans, averages_in, plans_of
from graphopt.tracing.call import Call
from graphopt.tracing.capture import trace_from_state
from graphopt.tracing.captured_dialect import finish
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import MoreInputs
from graphopt.tracing.optimizers.beforehand import with_state_used
from graphopt.tracing.optimizers.new_state import NewState
from graphopt.tracing.ranks.reduction import MarkedCommunication
from graphopt.tracing.retries import retried
from graphopt.tracing.trace import RawTrace, trace


class JointTrace(CallCapture):
    """The capture of a call whose gradients are averaged in an order that the ranks agree on."""

    def __init__(self, parallel: OverRanks) -> None:
        super().__init__()
        self._parallel = parallel
        self._beforehand = True
        self._averages: list[str] = []

    def first_trace(
        self, call: Call, communication: MarkedCommunication | None
    ) -> tuple[Call, RawTrace, NewState]:
        """A first trace without knowledge of the parameters that other ranks use."""
        decided, lasts = call.decided, self._beforehand
        known = tuple(answer for answer in decided if not isinstance(answer, UsedParameters))
        call, raw, made = trace_from_state(call.with_answers(known), communication, lasts=lasts)
        if len(known) < len(decided):
            raw.inputs.answers[: len(known)] = decided
            call = call.with_answers((*decided, *call.decided[len(known) :]))
        return call, raw, made

    def finished(
        self,
        call: Call,
        raw: RawTrace,
        made: NewState,
        communication: MarkedCommunication | None,
        order: Sequence[str],
        held: Set[str],
    ) -> tuple[Call, CapturedStep | None]:
        """The captured step in which gradients are averaged in the order of the ranks, or None and
        the call that is to be traced in place of this one.

        Args:
            raw, made: the first trace, which averages in this order or is repeated.
            held: see `finish`.
        """
        try:
            with made.present():
                found = _in_order(call, raw, made, communication, order)
                if found is None:  # it does not use the state that was made beforehand
                    self._beforehand = False
                    return call, None
                self._averages = averages_in(found[0].graph_module.graph, order)
                return call, finish(*found, communication, held)
        except (MoreInputs, CaptureError) as error:
            return retried(call, raw.inputs, error), None

    def plans(self, graphs: Mapping[str, fx.GraphModule]) -> Plans:
        """The plans of the graphs that run."""
        return plans_of(graphs, self._parallel, self._averages)


def _in_order(
    call: Call,
    raw: RawTrace,
    made: NewState,
    communication: MarkedCommunication | None,
    order: Sequence[str],
) -> tuple[RawTrace, NewState] | None:
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
    graph = raw.graph_module.graph
    return len(uniform_answers(graph)), any(decides_alone(node.target) for node in graph.nodes)


def outcomes(graph: fx.Graph) -> list[tuple[str, str]]:
    """The line and outcome of each decision by value in a graph."""
    found = (node.target for node in assumptions(graph))
    taken = (each for each in found if isinstance(each, Assumption))
    return [
        (each.line, repr(each.answer))
        for each in taken
        if not isinstance(each.answer, UsedParameters)
    ]
