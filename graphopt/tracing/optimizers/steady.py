"""The step that follows the first one, captured before the first one runs.

The first call of a step makes the optimizer's state and then does what every later call does. Both
are traced: the first call as it is, and the next one from the state that the first one makes. Where
the first trace without the nodes that make state is the second trace, node by node, one graph holds
for both: its state is made beforehand, and appears in the optimizer when the first call has run.

What is known of the next call beforehand is not traced again: state that torch's optimizers make
(`beforehand`), and gradients that a step drops unread (`dropped_gradients`). The second trace is
for state that the program's own optimizers make, for constants that the first call puts into
attributes and the next one may read, and for gradients that the first call does not find and the
next one does more with than to drop them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.tensor_classes import set_gradient
from graphopt.errors import CaptureError
from graphopt.graph_utils import get_output
from graphopt.guards.values import same_constant
from graphopt.ir.inplace import uninitialised_like
from graphopt.ir.metadata import fake_value
from graphopt.tracing.call import Call
from graphopt.tracing.collecting import collect
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import MoreInputs
from graphopt.tracing.optimizers.creation import Creation, creation_of
from graphopt.tracing.optimizers.dropped_gradients import with_dropped_gradients
from graphopt.tracing.optimizers.first_call import repeats_but_creation
from graphopt.tracing.optimizers.optimizer_state import entries_at, has, write
from graphopt.tracing.reduction import MarkedCommunication, UnagreedParameterError
from graphopt.tracing.results.signature import Computed, Constant
from graphopt.tracing.trace import RawTrace, trace

_MISSING: Any = object()

Entries = list[tuple[dict[Any, Any], Any, str, Any]]
"""State of optimizers, with the parameters or other keys, the second keys and the values to put
there."""


@dataclass
class NewState:
    """What the next call of a step finds and the first one does not.

    Attributes:
        entries: optimizer state that has been made.
        gradients: parameters that will have a gradient, each with a tensor of its kind.
        constants: attributes that the first call sets to something else than a tensor: where, name,
            value.
    """

    entries: Entries
    gradients: list[tuple[torch.Tensor, torch.Tensor]]
    constants: list[tuple[dict[str, Any], str, Any]]

    def __bool__(self) -> bool:
        return bool(self.entries or self.gradients or self.constants)

    def put(self) -> None:
        """Let optimizers and objects have it, but for the gradients."""
        for attributes, name, value in self.constants:
            attributes[name] = value
        for table, parameter, key, value in self.entries:
            write(table, parameter, key, value)

    @contextmanager
    def present(self) -> Iterator[None]:
        """While active, everything is as the next call finds it; nobody reads the gradients."""
        tables = {id(table): table for table, *_ in self.entries}.values()
        before = [
            (table, {of: set(entries_at(value)) for of, value in table.items()}) for table in tables
        ]
        attributes = [(of, name, of.get(name, _MISSING)) for of, name, _ in self.constants]
        try:
            self.put()
            for parameter, like in self.gradients:
                set_gradient(parameter, _any_values(parameter, like))
            yield
        finally:
            for parameter, _ in self.gradients:
                set_gradient(parameter, None)
            for table, known in before:
                _forget(table, known)
            for of, name, value in attributes:
                if value is _MISSING:
                    del of[name]
                else:
                    of[name] = value


NO_STATE = NewState([], [], [])


def _any_values(parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in memory like another one, fake where the parameter is."""
    if _compat.is_fake(parameter):
        return _compat.fake_laid_out(parameter, like.shape, like.stride(), like.dtype)
    return uninitialised_like(like)


def _forget(table: dict[Any, Any], known: dict[Any, set[str]]) -> None:
    for parameter in [parameter for parameter in table if parameter not in known]:
        del table[parameter]
    for parameter, keys in known.items():
        for key in entries_at(table[parameter]).keys() - keys:
            del table[parameter][key]


@dataclass
class Steady:
    """The next call of a step, which the first one equals once its state is there."""

    raw: RawTrace
    inputs: Inputs
    state: NewState


def steady_step(
    call: Call,
    inputs: Inputs,
    communication: MarkedCommunication | None,
    first: RawTrace,
    made: NewState,
) -> Steady | None:
    """The step as its next call runs it; None where that is the same anyway, or differs in more
    than what it finds.

    Args:
        made: optimizer state that is there for the first call already.

    Raises:
        CaptureError: the next call cannot be captured.
    """
    creation = creation_of(first) if _are_new(call, inputs, first) else None
    if creation is None or (communication is not None and _reads_tensors(creation)):
        return None
    state = _made(call, inputs, first, creation)
    if not state:
        return None
    if not (state.entries or state.constants):
        known = with_dropped_gradients(first, inputs, state.gradients)
        if known is not None:
            state.entries = made.entries
            return Steady(*known, state)
    with state.present():
        following = collect(call, inputs)
        try:
            second = trace(call, following, communication)
        except UnagreedParameterError:
            return None
        except CaptureError:
            if state.constants:  # said when that call comes, if it finds these
                return None
            raise
        except MoreInputs as error:
            holders = [each.place.holder for each in error.besides.carried]
            if not all(map(first.outside.is_outside, holders)):  # this call makes them
                return None
            raise
    equal = repeats_but_creation(call, (first, inputs), (second, following), creation)
    state.entries = [*made.entries, *state.entries]
    return Steady(second, following, state) if equal else None


def _are_new(call: Call, inputs: Inputs, first: RawTrace) -> bool:
    """Whether a step replaces no state."""
    optimizers, tensors = call.optimizer_objects(), inputs.module_tensors
    return not any(
        has(optimizers[state.optimizer].state, state.stands_at(tensors), state.key)
        for state in first.signature.states
    )


def _reads_tensors(creation: Creation) -> bool:
    """Whether state is made from values of parameters, which the ranks may still have to share."""
    return any(node.op == "placeholder" and fake_value(node).ndim for node in creation.needed)


def _made(call: Call, inputs: Inputs, first: RawTrace, creation: Creation) -> NewState | None:
    made = creation.run(first.graph_module, inputs.live_values(call))
    uses = first.looks_at_gradients or bool(first.dropped_gradients)
    gradients = _left_gradients(inputs, first) if uses else []
    if made is None or gradients is None:
        return None
    tables: list[dict[Any, Any]] = [optimizer.state for optimizer in call.optimizer_objects()]
    tensors = inputs.module_tensors
    entries = [(tables[s.optimizer], s.stands_at(tensors), s.key, value) for s, value in made]
    constants = [
        (attributes, name, value)
        for attributes, name, value in first.signature.constant_attributes()
        if not same_constant(attributes.get(name, _MISSING), value)
    ]
    return NewState(entries, gradients, constants)


def _left_gradients(
    inputs: Inputs, first: RawTrace
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Parameters to which a step has given their first gradient, each with its kind; None where
    that is no tensor of its own."""
    results: Any = get_output(first.graph_module.graph).args[0]
    found = []
    for gradient in first.signature.gradients:
        tensor = None if gradient.owner is None else inputs.module_tensors[gradient.owner].tensor
        if tensor is None or tensor.grad is not None or gradient.recipe == Constant(None):
            continue
        recipe = gradient.recipe
        node = results[recipe.index] if isinstance(recipe, Computed) else None
        if not isinstance(node, fx.Node):
            return None
        found.append((tensor, fake_value(node)))
    return found
