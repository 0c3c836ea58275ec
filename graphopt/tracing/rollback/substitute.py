"""Insertion of stand-ins for real tensors into modules and optimizers, and restoration afterwards.

The real tensors are never touched: the dictionaries of modules and optimizers that hold them are
changed and restored, whatever the step does or raises in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.effects.tuples import TupleTable, nests_in, with_leaf
from graphopt.tracing.inputs.entries import (
    ArgumentNumber,
    Inputs,
    PlacedNumber,
    StateNumber,
    state_key,
)
from graphopt.tracing.inputs.implicit import CarriedPlace, NamedModules
from graphopt.tracing.optimizers.optimizer_state import (
    entries_at,
    is_nest,
    of_none,
    tensors_of,
    write,
)
from graphopt.tracing.optimizers.setting_place import may_be_left
from graphopt.tracing.optimizers.watched_state import WatchedState
from graphopt.tracing.outside.known_objects import StandInContainer
from graphopt.tracing.outside.places import MISSING, OutsidePlace
from graphopt.tracing.rollback.contents import containers_kept
from graphopt.tracing.rollback.generators import undisturbed
from graphopt.tracing.rollback.nests import with_leaves


@dataclass
class StandIns:
    """The stand-in tensors and numbers that the step sees in a trace.

    Attributes:
        by_id: `id(real tensor)` to its traced stand-in.
        numbers: symbolic value per hyperparameter, in the order of `Inputs.hyperparameters`.
        gradients: `id(ModuleTensor)` to the traced gradient that exists when the step begins.
        states: per optimizer, the entries of its state when the step begins, by `traced_key`.
    """

    by_id: dict[int, torch.Tensor]
    numbers: list[Any]
    gradients: dict[int, torch.Tensor]
    states: list[dict[Any, dict[str, Any]]] = field(default_factory=list)


def traced_key(key: Any) -> Any:
    """The key for an entry of a traced optimizer's state, which may be a tensor."""
    return id(key) if isinstance(key, torch.Tensor) else ("of none", key)


@contextmanager
def preserved(
    modules: NamedModules,
    optimizers: Sequence[Optimizer],
    others: Iterable[Any],
    opened: Sequence[Any],
    carried: Iterable[CarriedPlace],
) -> Iterator[None]:
    """Restore what holds stand-ins, and random number generators, on leaving, also after an error.

    Args:
        others: arguments that are neither modules nor optimizers nor tensors.
        opened: dictionaries and lists in objects among the arguments.
        carried: places outside the arguments.
    """
    containers = list(opened)
    for _, module in modules:
        containers += [vars(module), *_compat.own_tables(module)]
        containers.append(_compat.weights_of_layers(module))
    for optimizer in optimizers:
        containers += [vars(optimizer), *optimizer.param_groups]
    for value in others:
        attributes = getattr(value, "__dict__", None)
        if type(value).__module__ != "builtins" and isinstance(attributes, dict):
            containers.append(attributes)
    with undisturbed(), containers_kept(containers), ExitStack() as stack:
        for each in carried:
            if each.place.is_written:
                stack.callback(_put_back, each.place, each.place.now())
        yield


def _put_back(place: OutsidePlace, value: Any) -> None:
    """Restores an item; those of an emptied list are restored later, all at once."""
    if place.now() is not MISSING or not isinstance(place.holder, list):
        place.write(value)


def insert(optimizers: Sequence[Optimizer], inputs: Inputs, traced: StandIns) -> None:
    """Stores the stand-ins in modules and optimizers. Undone by `preserved`."""
    for entry in inputs.module_tensors:
        for owner, key in entry.slots:
            owner[key] = traced.by_id[id(entry.tensor)]
    for number, symbolic in zip(inputs.hyperparameters, traced.numbers, strict=True):
        if isinstance(number, PlacedNumber) and number.place.is_written:
            place, element = number.place, number.element
            place.write(
                symbolic if element is None else with_leaf(place.now(), element[0], symbolic)
            )
    groups: dict[int, _Settings] = {}
    states: dict[int, defaultdict[Any, Any]] = {}
    for index, optimizer in enumerate(optimizers):
        _insert_into_optimizer(optimizer, index, inputs, traced, groups, states)


def inserted_containers(inputs: Inputs) -> dict[int, StandInContainer]:
    """The lists and tuples of stand-ins in places whose tensors are inputs, by id."""
    tables = (owner for entry in inputs.module_tensors for owner, _ in entry.slots)
    found: dict[int, StandInContainer] = {}
    for table in tables:
        if isinstance(table, TupleTable):
            for path, each in nests_in(table.place.now()):
                found[id(each)] = StandInContainer(each, table.place, path)
    return found


def _insert_into_optimizer(
    optimizer: Optimizer,
    index: int,
    inputs: Inputs,
    traced: StandIns,
    groups: dict[int, _Settings],
    states: dict[int, defaultdict[Any, Any]],
) -> None:
    """Stores the stand-ins in one optimizer. `groups` and `states` map ids of real ones to those
    inserted before, since a wrapping optimizer shares them."""
    real = optimizer.param_groups
    optimizer.param_groups = [groups.setdefault(id(group), _Settings(group)) for group in real]
    for original, group in zip(real, optimizer.param_groups, strict=True):
        stand_ins = [traced.by_id[id(parameter)] for parameter in original["params"]]
        dict.__setitem__(group, "params", stand_ins)
    known = id(optimizer.state)
    if known not in states:
        parameters = [parameter for group in real for parameter in group["params"]]
        states[known] = _traced_state(optimizer, parameters, traced)
    state = optimizer.state = states[known]
    for number, symbolic in zip(inputs.hyperparameters, traced.numbers, strict=True):
        if isinstance(number, (ArgumentNumber, PlacedNumber)) or number.optimizer != index:
            continue
        if isinstance(number, StateNumber):
            owner = state_key(number.parameter)
            owner = traced.by_id[id(owner)] if isinstance(owner, torch.Tensor) else owner
            write(state, owner, number.key, symbolic)
            continue
        group = optimizer.param_groups[number.group]
        if number.element is None:
            dict.__setitem__(group, number.key, symbolic)
        else:
            parts = list(group[number.key])
            parts[number.element] = symbolic
            dict.__setitem__(group, number.key, tuple(parts))
    traced.states.append(
        {
            traced_key(key): {k: with_leaves(v, lambda v: v) for k, v in entries_at(of).items()}
            for key, of in state.items()
        }
    )


def _traced_state(
    optimizer: Optimizer, parameters: Iterable[torch.Tensor], traced: StandIns
) -> defaultdict[Any, Any]:
    """An optimizer's state with stand-ins in place of tensors."""
    state: defaultdict[Any, Any] = WatchedState(dict)
    for parameter in parameters:
        entries = optimizer.state.get(parameter)
        if entries is not None:
            state[traced.by_id[id(parameter)]] = {
                key: _stand_ins_in(key, value, traced) for key, value in entries.items()
            }
    for none, loose in of_none(optimizer.state):
        for key, value in loose.items():
            write(state, none.key, key, traced.by_id.get(id(value), value))
        if not loose:
            state[none.key] = {}
    return state


def has_left_over(optimizer: Optimizer) -> bool:
    """True if an optimizer's state has entries of parameters in none of its groups."""
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(isinstance(key, torch.Tensor) and id(key) not in grouped for key in optimizer.state)


def _stand_ins_in(key: Any, value: Any, traced: StandIns) -> Any:
    """The stand-in of a state entry, or a copy of a nested one with stand-ins."""
    if not is_nest(value):
        return traced.by_id.get(id(value), value)
    if next(tensors_of(key, value), None) is None:
        return value
    return with_leaves(value, lambda leaf: traced.by_id.get(id(leaf), leaf))


class _Settings(dict[str, Any]):
    """A parameter group in which the step may only change numbers, tuples of numbers and flags."""

    def __setitem__(self, key: str, value: Any) -> None:
        if may_be_left(key, value):
            dict.__setitem__(self, key, value)
            return
        if key in self and value is self[key]:
            return  # what each call finds there is looked at in any case
        raise CaptureError(
            f"it changes {key!r} of an optimizer's parameter group",
            location=current_location(),
            hint="change it outside the step, between two calls",
        )
