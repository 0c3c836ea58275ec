"""Collects the tensors and numbers that a step takes as inputs, before its trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, MutableMapping
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.runtime.late.tensors import names_of_held
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.effects.tuples import TupleTable, is_tensor, leaves_of
from graphopt.tracing.inputs.entries import (
    ArgumentNumber,
    GradientInput,
    Hyperparameter,
    Inputs,
    Kind,
    ModuleTensor,
    PlacedNumber,
    StateNumber,
    StateTensor,
    Storage,
    is_alias,
    is_exact,
    is_number,
    may_be_input,
)
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs
from graphopt.tracing.layouts.parts_of_storage import refuse_overlaps
from graphopt.tracing.optimizers.optimizer_state import (
    ITSELF,
    NonParameterKey,
    distinct_states,
    of_none,
    tensors_of,
)
from graphopt.tracing.outside.places import OutsidePlace, place_in
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.scalars.numbers import SCHEDULED
from graphopt.tracing.tensors.lost_history import accumulates, marks_of


def collect(call: Call) -> Inputs:
    """Finds every input of `call`. Touches nothing."""
    tensors = module_tensors(call)
    gradients = [
        GradientInput(entry, f"{entry.fqn}.grad") for entry in tensors if has_gradient(entry.tensor)
    ]
    by_id = {id(entry.tensor): entry for entry in tensors}
    inputs = Inputs(
        module_tensors=tensors,
        placeholders=_placeholders(tensors),
        states=list(_states(call, by_id)),
        gradients=gradients,
        hyperparameters=[
            *_hyperparameters(call),
            *_state_numbers(call, by_id),
            *_argument_numbers(call),
            *_placed_numbers(call),
        ],
        user=[p for p in call.tensors if id(call.leaves[p]) not in by_id],
    )
    leaves = {id(call.leaves[position]): position for position in inputs.user}
    inputs.argument_gradients = [p for p in leaves.values() if has_gradient(call.leaves[p])]
    inputs.names = {position: call.names[position] for position in inputs.user}
    _take_aliases(inputs, call)
    inputs.answers.extend(call.decided)
    inputs.sizes = call.sizes
    refuse_overlaps(inputs.kinds_and_names(), inputs.live_values(call))
    inputs.held = _held(inputs, call)
    return inputs


def _held(inputs: Inputs, call: Call) -> frozenset[str]:
    named = [(entry.fqn, entry.tensor) for entry in inputs.module_tensors]
    named += [(state.fqn, state.read(call)) for state in inputs.states]
    found = names_of_held(named)
    return found if any(entry.fqn not in found for entry in inputs.parameters) else frozenset()


def module_tensors(call: Call) -> list[ModuleTensor]:
    """The tensors of the call's modules and implicit inputs; parameters first."""
    found: dict[int, ModuleTensor] = {}

    def add(kind: Kind, fqn: str, owner: MutableMapping[str, Any], key: str) -> None:
        tensor = owner[key]
        if not isinstance(tensor, torch.Tensor):
            return
        entry = found.setdefault(id(tensor), ModuleTensor(kind, fqn, tensor, []))
        if not any(table is owner and name == key for table, name in entry.slots):
            entry.slots.append((owner, key))

    modules = list(call.named_submodules())
    attributes: set[int] = set()
    for prefix, module in modules:
        for key in _compat.own_parameters(module):
            add("parameter", _join(prefix, key), _compat.own_parameters(module), key)
    for prefix, module in modules:
        for key, tensor in (buffers := _compat.own_buffers(module)).items():
            if OutsidePlace("item", buffers, key).identity in call.besides.replaced:
                attributes.add(id(tensor))
            add("buffer", _join(prefix, key), buffers, key)
    for path, table, key in _alone(call.besides, found):
        add("buffer", path, table, key)
    for name, tensor in bare_tensors(call):
        kind: Kind = "parameter" if accumulates(tensor) else "buffer"
        found.setdefault(id(tensor), ModuleTensor(kind, name, tensor, [], bare=True))
    for prefix, module in modules:
        for key in tensor_attributes(module):
            if id(vars(module)[key]) not in found:
                attributes.add(id(vars(module)[key]))
            add("buffer", _join(prefix, key), vars(module), key)
    for name, table, key in list(_marks(found.values())):
        if id(table[key]) not in found:
            attributes.add(id(table[key]))
        add("buffer", name, table, key)
    for each in call.besides.carried:
        attributes.update(id(table[key]) for _, table, key in _tensors_at(each))
    entries = list(found.values())
    names: set[str] = set()
    for entry in entries:
        entry.fqn = _distinct(entry.fqn, names)
        alone = id(entry.tensor) in attributes and len(entry.slots) == 1
        entry.rebindable = alone and place_of(entry).identity not in call.besides.found_twice
    return sorted(entries, key=lambda entry: entry.kind != "parameter")


def _distinct(name: str, names: set[str]) -> str:
    """A name unlike all earlier ones: two closures may name different models alike.

    >>> names = {"model.weight"}
    >>> _distinct("model.weight", names), _distinct("model.weight", names)
    ('model.weight (2)', 'model.weight (3)')
    """
    numbered = (f"{name} ({number})" for number in count(2))
    chosen = next(each for each in chain([name], numbered) if each not in names)
    names.add(chosen)
    return chosen


def _marks(entries: Iterable[ModuleTensor]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields tensors that are attributes of parameters and buffers."""
    for entry in entries:
        for key, _ in marks_of(entry.tensor):
            yield f"{entry.fqn}.{key}", vars(entry.tensor), key


_Slot = tuple[str, MutableMapping[Any, Any], Any]
"""A name, a table and a key in it."""


def _alone(besides: ImplicitInputs, found: Collection[int]) -> Iterator[_Slot]:
    """Yields the places of tensors that the step finds in one place only."""
    places = {
        each.place.identity: each
        for each in besides.carried
        if each.place.identity not in besides.found_twice
    }
    slots = list(chain.from_iterable(map(_tensors_at, places.values())))
    values = [table[key] for _, table, key in slots]
    counts = Counter(map(id, values))
    for slot, value in zip(slots, values, strict=True):
        if counts[id(value)] == 1 and id(value) not in found and not accumulates(value):
            yield slot


def _tensors_at(carried: CarriedPlace) -> Iterator[_Slot]:
    """Yields the tensor in a place, or the tensors of a tuple there."""
    path, place, _ = carried
    if not place.may_carry:
        return
    value = place.now()
    if isinstance(value, torch.Tensor):
        yield path, place.table, place.key
    leaves, spec = leaves_of(value, is_tensor) or ([], None)
    if type(value) is list and len(set(map(id, leaves))) < len(leaves):
        return
    table = TupleTable(place, spec)
    yield from ((f"{path}[{position}]", table, position) for position in range(len(leaves)))


def place_of(entry: ModuleTensor) -> OutsidePlace:
    """The place of a tensor, or of the tuple that contains it."""
    table, key = entry.slots[0]
    return table.place if isinstance(table, TupleTable) else place_in(table, key)


def found_twice(inputs: Inputs, record: OutsideRecord) -> frozenset[Hashable]:
    """The places, by identity, whose tensor the step also finds elsewhere: in other calls they may
    hold different tensors."""
    read: dict[int, set[Hashable]] = {}
    for each in record.reads.values():
        if isinstance(each.value, torch.Tensor):
            read.setdefault(id(each.value), set()).add(each.place.identity)
    own = {id(e.tensor): place_of(e).identity for e in inputs.module_tensors if e.rebindable}
    return frozenset(place for tensor, place in own.items() if read.get(tensor, set()) - {place})


def bare_tensors(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the named tensors that belong to no module: of optimizers, and of implicit inputs."""
    yield from call.besides.tensors
    for position in call.optimizers:
        name = call.names[position]
        for index, group in enumerate(call.leaves[position].param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"{name}.param_groups[{index}]['params'][{place}]", parameter


def tensor_attributes(module: nn.Module) -> list[str]:
    """The module attributes that are unregistered tensors."""
    return [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _placeholders(tensors: list[ModuleTensor]) -> list[ModuleTensor | Storage]:
    groups: dict[int, list[ModuleTensor]] = {}
    for entry in tensors:
        key = _compat.storage_key(entry.tensor) if entry.tensor.numel() else id(entry)
        groups.setdefault(key, []).append(entry)
    result: list[ModuleTensor | Storage] = []
    for members in groups.values():
        if len(members) == 1:
            result.append(members[0])
            continue
        if len({member.tensor.dtype for member in members}) > 1:
            raise CaptureError(
                f"{members[0].fqn} and {members[1].fqn} view one storage with different dtypes",
                hint="give one of them storage of its own (tensor.clone())",
            )
        result.append(Storage(members[0].kind, members[0].fqn, members))
    return result


def _states(call: Call, by_id: dict[int, ModuleTensor]) -> Iterator[StateTensor]:
    for index, optimizer in distinct_states(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for parameter in _distinct_parameters(optimizer):
            owner = by_id[id(parameter)]
            for entry, value in optimizer.state.get(parameter, {}).items():
                for key, _ in tensors_of(entry, value):
                    yield StateTensor(index, owner, key, f"{prefix}.{owner.fqn}.{key}")
        for none, entries in of_none(optimizer.state):
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    yield StateTensor(index, none, key, _name_of_none(prefix, none, key))


def _distinct_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    of_groups = (each for group in optimizer.param_groups for each in group["params"])
    yield from {id(parameter): parameter for parameter in of_groups}.values()


def _take_aliases(inputs: Inputs, call: Call) -> None:
    """Separates optimizer state entries that share the memory of a module tensor."""
    if not inputs.states:
        return
    alone = [holder for holder in inputs.placeholders if isinstance(holder, ModuleTensor)]
    by_storage = {_compat.storage_key(h.tensor): h for h in alone if h.tensor.numel()}
    for state in list(inputs.states):
        value = state.read(call)
        owner = by_storage.get(_compat.storage_key(value)) if value.numel() else None
        if owner is not None and is_alias(value, owner):
            inputs.states.remove(state)
            inputs.aliases.append((state, owner))


def _hyperparameters(call: Call) -> Iterator[Hyperparameter]:
    known: set[int] = set()  # an optimizer that wraps another one has its groups
    for index, optimizer in enumerate(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for number, group in enumerate(optimizer.param_groups):
            if id(group) in known:
                continue
            known.add(id(group))
            for key, value in group.items():
                name = f"{prefix}.param_groups[{number}].{key}"
                parts = value if isinstance(value, tuple) else (value,)
                for element, part in enumerate(parts):
                    if not _is_input(key, part, call.besides.counts):
                        continue
                    if parts is value:
                        yield Hyperparameter(index, number, key, element, f"{name}[{element}]")
                    else:
                        yield Hyperparameter(index, number, key, None, name)


def _state_numbers(call: Call, by_id: dict[int, ModuleTensor]) -> Iterator[StateNumber]:
    for index, optimizer in distinct_states(call.optimizer_objects()):
        prefix = call.names[call.optimizers[index]]
        for parameter, of_parameter in optimizer.state.items():
            if id(parameter) not in by_id:
                continue
            owner = by_id[id(parameter)]
            for key, value in of_parameter.items():
                if is_exact(value):
                    yield StateNumber(index, owner, key, f"{prefix}.{owner.fqn}.{key}")
        for none, entries in of_none(optimizer.state):
            for key, value in entries.items():
                if is_exact(value):
                    yield StateNumber(index, none, key, _name_of_none(prefix, none, key))


def _name_of_none(prefix: str, none: NonParameterKey, key: str) -> str:
    name = f"{prefix}.state[{none.key!r}]"
    return name if key == ITSELF else f"{name}[{key!r}]"


def _argument_numbers(call: Call) -> Iterator[ArgumentNumber]:
    """Yields the integers and floats among the arguments."""
    if call.besides.plain:
        return
    for position in call.constants:
        if may_be_input(call.leaves[position]):
            yield ArgumentNumber(position, call.names[position])


def _placed_numbers(call: Call) -> Iterator[PlacedNumber]:
    numbers: dict[Any, list[PlacedNumber]] = {}
    for path, place, counted in call.besides.carried:
        if not counted and call.besides.plain:
            continue
        before = numbers.get(place.identity, [])
        counted = counted or any(each.counted for each in before)
        numbers[place.identity] = list(_numbers_at(place, path, counted)) or before
    yield from chain.from_iterable(numbers.values())


def _numbers_at(place: OutsidePlace, path: str, counted: bool) -> Iterator[PlacedNumber]:
    value = place.now()
    if may_be_input(value):
        yield PlacedNumber(place, path, counted)
    leaves, spec = leaves_of(value, is_exact) or ([], None)
    for position in range(len(leaves)):
        yield PlacedNumber(place, f"{path}[{position}]", counted, (position, spec))


def _is_input(key: str, value: object, counts: Collection[str]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return (key in SCHEDULED or key in counts) and is_number(value)
