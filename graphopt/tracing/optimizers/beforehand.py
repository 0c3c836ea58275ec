"""Optimizer state that is created before the first trace, so that one graph serves all calls.

Torch's own optimizers make the state of their parameters in the first step, and then do what every
later step does. So the first call is traced from the state that it makes, and that one trace is the
one of all calls; the state of parameters that it leaves alone is taken out of it. What it takes for
granted is looked at meanwhile: that a momentum of `SGD`, made of negative zeros, becomes the first
gradient (`noticed_steps`), and that the step does not look at the state itself. Where that is not
so, and with other optimizers, there are two graphs: one of the call that makes the state, and one
of all later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.fresh_state import attributes_after, fresh_state, makes_state_first
from graphopt.parallel.sharding import is_dtensor
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import StateNumber, state_key
from graphopt.tracing.optimizers.new_state import NO_STATE, Entries, NewState
from graphopt.tracing.optimizers.optimizer_state import distinct_states
from graphopt.tracing.trace import RawTrace


def state_beforehand(optimizers: Sequence[Optimizer]) -> NewState:
    """The state that each optimizer's next step creates for parameters without any; empty if
    unknown."""
    if not all(map(makes_state_first, optimizers)):
        return NO_STATE
    parameters = [p for of in optimizers for group in of.param_groups for p in group["params"]]
    if not all(map(_is_known, parameters)):
        return NO_STATE
    with _compat.fake_mode_of(parameters) or nullcontext():
        entries: Entries = [
            (optimizer.state, parameter, key, value)
            for _, optimizer in distinct_states(optimizers)
            for parameter, table in fresh_state(optimizer).items()
            for key, value in table.items()
        ]
    attributes = [
        (vars(optimizer), name, value)
        for optimizer in optimizers
        for name, value in attributes_after(optimizer).items()
    ]
    return NewState(entries, attributes)


def _is_known(parameter: torch.Tensor) -> bool:
    """True if the state that an optimizer will create for a parameter can be told beforehand."""
    plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) or is_dtensor(parameter)
    return (plain or _compat.is_fake(parameter)) and not parameter.is_sparse


def with_state_used(call: Call, made: NewState, raw: RawTrace) -> tuple[RawTrace, NewState] | None:
    """A trace without the created state of parameters that it does not update; None if the step
    must be traced without any created state."""
    inputs, signature = raw.inputs, raw.signature
    if raw.begins_otherwise:
        return None
    stepped = [vars(call.optimizer_objects()[index]) for index in signature.stepped]
    if not all(any(of is each for each in stepped) for of, _, _ in made.attributes):
        return None
    nodes = raw.graph_module.graph.find_nodes(op="placeholder")
    states = dict(zip(nodes[len(inputs.placeholders) :], inputs.states, strict=False))
    used = {id(state_key(state.parameter)) for node, state in states.items() if node.users}
    unused = {id(p) for _, p, _, _ in made.entries if id(p) not in used}
    if not unused:
        return raw, made
    numbers = (n for n in inputs.hyperparameters if isinstance(n, StateNumber))
    if signature.numbers_inputs() or any(id(state_key(n.parameter)) in unused for n in numbers):
        return None
    pairs = dict(zip(nodes, zip(raw.fakes, raw.values, strict=True), strict=True))
    for node, state in states.items():
        if id(state_key(state.parameter)) in unused:
            raw.graph_module.graph.erase_node(node)
            del pairs[node]
    raw.graph_module.recompile()
    kept = [state for state in inputs.states if id(state_key(state.parameter)) not in unused]
    entries = [entry for entry in made.entries if id(entry[1]) not in unused]
    fakes, values = map(list, zip(*pairs.values(), strict=True))
    smaller = replace(raw, inputs=replace(inputs, states=kept), fakes=fakes, values=values)
    return with_state_used(call, replace(made, entries=entries), smaller)
