"""Optimizer state that is made before the first call of a step is traced.

Torch's own optimizers make the state of their parameters in the first step, and then do what every
later step does. So the first call is traced from the state that it makes, and that one trace is the
one of all calls. What it takes for granted is looked at afterwards: that each parameter whose state
was made is updated, and that the step has not looked at the state itself.
"""

from __future__ import annotations

import torch

from graphopt import _compat
from graphopt._compat.fresh_state import fresh_state, makes_state_first
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, state_key
from graphopt.tracing.optimizers.optimizer_state import distinct_states
from graphopt.tracing.optimizers.steady import NO_STATE, Entries, NewState
from graphopt.tracing.trace import RawTrace


def state_beforehand(call: Call, left_alone: frozenset[int] | None) -> NewState:
    """The state that the first step of each optimizer makes; none where that is not known.

    Args:
        left_alone: ids of parameters that no optimizer updates; None: it is not known at all.
    """
    optimizers = call.optimizer_objects()
    if left_alone is None or not all(map(makes_state_first, optimizers)):
        return NO_STATE
    parameters = [p for of in optimizers for group in of.param_groups for p in group["params"]]
    kinds = {torch.nn.Parameter, torch.Tensor}
    if any(type(p) not in kinds or _compat.is_fake(p) or p.is_sparse for p in parameters):
        return NO_STATE
    entries: Entries = [
        (optimizer.state, parameter, key, value)
        for _, optimizer in distinct_states(optimizers)
        for parameter, table in fresh_state(optimizer, left_alone).items()
        for key, value in table.items()
    ]
    return NewState(entries, [], [])


def parameters_left_alone(made: NewState, inputs: Inputs, raw: RawTrace) -> frozenset[int] | None:
    """Parameters whose state was made although the step does not update them; None where the step
    has to be traced as it finds the state."""
    if raw.looks_at_state or raw.signature.states:
        return None
    start = len(inputs.placeholders)
    nodes = raw.graph_module.graph.find_nodes(op="placeholder")[start:]
    pairs = zip(inputs.states, nodes, strict=False)
    used = {id(state_key(state.parameter)) for state, node in pairs if node.users}
    return frozenset(id(p) for _, p, _, _ in made.entries if id(p) not in used)
