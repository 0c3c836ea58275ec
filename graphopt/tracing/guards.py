"""When a captured graph may be used again, and if not, why not.

`make_fx` specializes without saying on what. These guards hold everything a step is specialized
on: the arguments, the modules, the optimizers' settings, and torch's modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import environment
from graphopt.tracing.besides import CarriedPlace
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.guard_values import (
    describe,
    gradient_kind,
    is_plain,
    same_constant,
    tensor_kind,
)
from graphopt.tracing.host_numbers import EXACT, first_leaf
from graphopt.tracing.inputs import (
    ArgumentNumber,
    Inputs,
    ModuleTensor,
    PlacedNumber,
    Storage,
    is_alias,
    is_exact,
    state_key,
)
from graphopt.tracing.object_guards import ModuleGuards
from graphopt.tracing.optimizer_guards import OptimizerGuard
from graphopt.tracing.optimizer_state import entries_at, is_nest, value_at
from graphopt.tracing.outside.guard import OutsideGuard
from graphopt.tracing.signature import Signature
from graphopt.tracing.snapshot import StateSnapshot, body_of, is_body


class Guards:
    """Everything one captured graph depends on."""

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        mode: tuple[Any, ...],
        signature: Signature,
        outside: OutsideGuard | None = None,
    ) -> None:
        assigned: dict[int, set[str]] = {}
        for result in signature.attributes:
            assigned.setdefault(id(result.attributes), set()).add(result.name)
        for left in signature.placed:
            assigned.setdefault(id(left.place.holder), set()).add(left.place.key)
        for added in signature.appended:
            assigned.setdefault(id(added.container), set())
        placed: dict[int, set[str]] = {}
        for number in inputs.hyperparameters:
            if isinstance(number, PlacedNumber) and number.place.is_item:
                placed.setdefault(id(number.place.holder), set()).add(number.place.key)
        self.mode = mode
        self.besides = call.besides
        self.outside = outside
        self.environment = environment()
        self.treespec = call.treespec
        self.modules = ModuleGuards(
            (name, m, assigned.get(id(vars(m)), ()), placed.get(id(vars(m)), ()), assigned)
            for name, m in call.named_submodules()
        )
        # A cached graph must not keep a model alive that the user has dropped.
        self.roots = [
            (weakref.ref(call.leaves[position]), body_of(call.leaves[position]))
            for position in call.modules
        ]
        self.optimizers = [
            OptimizerGuard(
                call.names[position],
                call.leaves[position],
                call.besides.counts,
                placed.get(id(vars(call.leaves[position])), ()),
            )
            for position in call.optimizers
        ]
        self.constants = [call.leaves[position] for position in call.constants]
        self.numbers = {n.position for n in inputs.hyperparameters if isinstance(n, ArgumentNumber)}
        self._numbers: tuple[weakref.ref[Call], list[Any]] | None = None
        self.number_types = [type(number.read(call)) for number in inputs.hyperparameters]
        self.positions = _positions(call)
        user = set(inputs.user)
        self.user = [
            (p, tensor_kind(call.leaves[p]), gradient_kind(call.leaves[p])) for p in inputs.user
        ]
        entries = {id(entry.tensor): entry for entry in inputs.module_tensors}
        self.shared = [(p, entries[id(call.leaves[p])]) for p in call.tensors if p not in user]
        self._moving = [inputs.module_tensors[index] for index in inputs.rebound]
        moving = set(map(id, self._moving))
        self._fixed_storages = frozenset(
            _compat.storage_key(h.tensor) for h in inputs.module_tensors if id(h) not in moving
        )
        self.aliases = _aliases(call, self._module_storages())
        self.rebindable = [
            (entry, entry.slots[0], tensor_kind(entry.tensor))
            for entry in inputs.module_tensors
            if entry.rebindable
        ]
        # The dictionaries themselves: to ask a late parameter for its own would be a use of it.
        marks = [(entry, vars(entry.tensor)) for entry in inputs.module_tensors]
        inside = {(id(owner), key) for _, (owner, key), _ in self.rebindable}
        self._marked = [
            (entry, now, {key: _INPUT if (id(now), key) in inside else now[key] for key in now})
            for entry, now in marks
            if now
        ]
        self._unmarked = [attributes for _, attributes in marks if not attributes]
        self._attributes = list(_attribute_slots(call, inputs))
        self.sharing = _sharing(call, inputs) if self.rebindable else []
        self.storages = [(h, _layout(h)) for h in inputs.placeholders if isinstance(h, Storage)]
        self.inputs = inputs
        self.states = _read_states(call, inputs)
        self.state_kinds = [tensor_kind(value) for value in self.states]
        self.state_entries = _state_entries(call)
        self._unchanged = _state_of(call)
        self.parameters = [
            entry
            for entry in inputs.module_tensors
            if entry.kind == "parameter" or entry.tensor.requires_grad
        ]
        self.gradients = self._gradients_now()

    def _module_storages(self) -> frozenset[int]:
        """The storages of all module tensors; some get others in each call."""
        if not self._moving:
            return self._fixed_storages
        return self._fixed_storages | {_compat.storage_key(h.tensor) for h in self._moving}

    def alive(self) -> bool:
        """Whether the modules still exist."""
        return all(root() is not None for root, _ in self.roots)

    def may_fit(self) -> bool:
        """Whether everything that this rank's step has read still exists, as far as it must."""
        return self.alive() and (self.outside is None or self.outside.alive)

    def structure_mismatch(self, call: Call, mode: tuple[Any, ...]) -> str | None:
        """The first thing that all ranks see alike and that is no longer as captured."""
        return next(self.structure_mismatches(call, mode), None)

    def structure_mismatches(self, call: Call, mode: tuple[Any, ...]) -> Iterator[str]:
        """All such things, where they can be told apart."""
        extended = call.using(self.besides)
        if extended is None:
            yield "a module or an optimizer that it used besides its arguments is gone"
            return
        call = extended
        if mode != self.mode:
            yield f"{mode} in place of {self.mode}"
        same = call.treespec is self.treespec or call.treespec == self.treespec
        if not same or _positions(call) != self.positions:
            yield "the structure of the arguments changed"
            return
        if environment() != self.environment:
            yield "grad mode, autocast or another mode of torch changed"
        for (root, body), position in zip(self.roots, call.modules, strict=True):
            if call.leaves[position] is not root() or not is_body(call.leaves[position], body):
                yield f"{call.names[position]} is another module"
                return
        yield from self.modules.mismatches()
        for settings, position in zip(self.optimizers, call.optimizers, strict=True):
            reason = settings.mismatch(call.leaves[position])
            if reason is not None:
                yield reason

    def local_mismatch(self, call: Call) -> str | None:
        """The first thing that may differ on this rank alone and is no longer as captured."""
        for value, position in zip(self.constants, call.constants, strict=True):
            if position not in self.numbers and not same_constant(call.leaves[position], value):
                return f"argument {call.names[position]} became {call.leaves[position]!r}"
        if self.outside is not None:
            for change in self.outside.mismatches():
                return change
        reason = self._refresh_states(call)
        if reason is not None:
            return reason
        for state, module_tensor in self.inputs.aliases:
            if not is_alias(state.read(call), module_tensor):
                return f"{state.fqn} no longer shares storage as it did"
        gradients = self._gradients_now()
        if gradients != self.gradients:
            index = next(i for i, now in enumerate(gradients) if now is not self.gradients[i])
            what = "exists now" if gradients[index] else "is gone"
            return f"{self.parameters[index].fqn}.grad {what}"
        reason = self._changed_number(call)
        if reason is not None:
            return reason
        for entry, (owner, key), kind in self.rebindable:
            tensor = owner.get(key)
            if not isinstance(tensor, torch.Tensor) or tensor_kind(tensor) != kind:
                return f"{entry.fqn} became {tensor!r}"
        if any(self._unmarked):
            return "a parameter or buffer got an attribute"
        for entry, now, marks in self._marked:
            if not _same_marks(now, marks):
                return f"attributes of {entry.fqn} changed"
        for entry, owner, key in self._attributes:
            if owner.get(key) is not entry.tensor:
                return f"{entry.fqn} became another tensor"
        if self.rebindable and _sharing(call, self.inputs) != self.sharing:
            return f"{self.rebindable[0][0].fqn} or another such tensor shares storage otherwise"
        for holder, layout in self.storages:
            if _layout(holder) != layout:
                return f"{holder.fqn} no longer shares storage as it did"
        for position, entry in self.shared:
            if call.leaves[position] is not entry.live():
                return f"argument {call.names[position]} is another tensor"
        return None

    def counted_for(self, call: Call) -> list[CarriedPlace]:
        """Places in which the step counts, where a call is given the same objects."""
        if call.constants != self.positions[3]:
            return []
        given = zip(self.constants, call.constants, strict=True)
        if not all(is_plain(value) or call.leaves[at] is value for value, at in given):
            return []
        return [each for each in self.besides.carried if each.counted]

    def numbers_of(self, call: Call) -> list[Any]:
        """The hyperparameters of a call that fits, in order."""
        found, self._numbers = self._numbers, None
        if found is not None and found[0]() is call:  # another thread may have asked since
            return found[1]
        return [number.read(call) for number in self.inputs.hyperparameters]

    def _gradients_now(self) -> list[bool]:
        """For each parameter, and each tensor like one, whether it has a gradient."""
        return [_has_gradient(entry) for entry in self.parameters]

    def _changed_number(self, call: Call) -> str | None:
        """The first number that is of another kind, or no longer as the step has asked."""
        numbers = self.inputs.hyperparameters
        values = [number.read(call) for number in numbers]
        self._numbers = weakref.ref(call), values
        kinds = zip(numbers, values, self.number_types, strict=True)
        for at, (number, value, kind) in enumerate(kinds):
            if at in self.inputs.unread and _are_floats(value, kind):
                continue
            if type(value) is not kind or (kind is int and abs(value) >= EXACT):
                return f"{_called(number)} became {value!r}"
        drawn = self.inputs.drawn
        try:
            values = call.drawn.of(drawn, values)
        except Exception as error:  # as the step itself raises it
            return f"a random number became {error!r}"
        for condition in self.inputs.conditions.all:
            if not condition.holds(values):
                index = first_leaf(condition.left)
                index = first_leaf(condition.right) if index is None else index
                assert index is not None
                named = _called(numbers[index]) if index < len(numbers) else drawn.said(index)
                return f"{named} became {values[index]!r}"
        return None

    def _refresh_states(self, call: Call) -> str | None:
        """Read the optimizer state into `states`; tensors seen before are known to fit."""
        tables, unchanged = self._unchanged
        if unchanged.holds() and all(map(is_, _tables(call), tables)):
            return None
        if _state_entries(call) != self.state_entries:
            return "optimizer state was created, dropped or changed its kind"
        now = _read_states(call, self.inputs)
        storages = self._module_storages()
        for index, (value, before) in enumerate(zip(now, self.states, strict=True)):
            if value is before:
                continue
            if not isinstance(value, torch.Tensor) or tensor_kind(value) != self.state_kinds[index]:
                return f"{self.inputs.states[index].fqn} changed its shape or dtype"
            if value.numel() and _compat.storage_key(value) in storages:
                return f"{self.inputs.states[index].fqn} shares storage with the model now"
        self.states = now
        self._unchanged = _state_of(call)
        return None

    def shape_mismatch(self, call: Call) -> str | None:
        """The first tensor argument that is of another kind than captured."""
        for position, kind, gradient in self.user:
            now = tensor_kind(call.leaves[position])
            if now != kind:
                return f"argument {call.names[position]}: {describe(kind, now)}"
            if gradient_kind(call.leaves[position]) != gradient:
                return f"the gradient of argument {call.names[position]} came, went or changed"
        if _aliases(call, self._module_storages()) != self.aliases:
            return "which tensor arguments are the same changed"
        return None


_INPUT: Any = object()
"""Stands for an attribute of a parameter that is an input, which may be another in each call."""


def _has_gradient(entry: ModuleTensor) -> bool:
    if not entry.rebindable:
        return entry.tensor.grad is not None
    owner, key = entry.slots[0]
    return isinstance(owner.get(key), torch.Tensor) and has_gradient(owner[key])


def _are_floats(value: object, kind: type) -> bool:
    return isinstance(value, float) and issubclass(kind, float)


def _called(number: Any) -> str:
    """What a message calls a number."""
    return f"argument {number.fqn}" if isinstance(number, ArgumentNumber) else str(number.fqn)


def _layout(holder: Storage) -> list[int]:
    """Where the members of a storage lie: their offsets, -1 for one that has left it."""
    first = _compat.storage_key(holder.members[0].live())
    return [
        int(tensor.storage_offset()) if _compat.storage_key(tensor) == first else -1
        for tensor in (member.live() for member in holder.members)
    ]


def _same_marks(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a tensor has the attributes that a program had set on it."""
    return now.keys() == before.keys() and all(
        value is _INPUT or now[name] is value or same_constant(now[name], value)
        for name, value in before.items()
    )


def _attribute_slots(
    call: Call, inputs: Inputs
) -> Iterator[tuple[ModuleTensor, dict[str, Any], str]]:
    """Attributes, other than parameters and buffers, whose tensor has other places, too."""
    registered = {
        id(table) for _, module in call.named_submodules() for table in _compat.own_tables(module)
    }
    for entry in inputs.module_tensors:
        for owner, key in entry.slots:
            if not entry.rebindable and id(owner) not in registered:
                yield entry, owner, key


def _sharing(call: Call, inputs: Inputs) -> list[int]:
    """Which of the tensors that may be others in each call share storage."""
    tensors = [entry.live() for entry in inputs.module_tensors if entry.rebindable]
    tensors += [call.leaves[position] for position in inputs.user]
    first: dict[int, int] = {}
    return [first.setdefault(_compat.storage_key(t), i) for i, t in enumerate(tensors)]


def _positions(call: Call) -> tuple[list[Any], ...]:
    return (call.modules, call.optimizers, call.tensors, call.constants, call.repeats)


def _aliases(call: Call, module_storages: frozenset[int]) -> tuple[int, ...]:
    """For each tensor argument the first position of the same tensor, of the same storage, and
    whether a module has its storage."""
    first: dict[Any, int] = {}
    found = []
    for position in call.tensors:
        tensor = call.leaves[position]
        key = _compat.storage_key(tensor)
        found.append(first.setdefault(id(tensor), position))
        found.append(first.setdefault(("storage", key), position))
        found.append(key in module_storages)
    return tuple(found)


def _tables(call: Call) -> list[dict[Any, Any]]:
    """The state of each optimizer, by parameter."""
    return [optimizer.state for optimizer in call.optimizer_objects()]


def _state_of(call: Call) -> tuple[list[dict[Any, Any]], StateSnapshot]:
    tables, snapshot = _tables(call), StateSnapshot()
    for table in tables:
        snapshot.has_items(table)
        for entries in table.values():
            if isinstance(entries, dict):
                _see_entries(entries, snapshot)
    return tables, snapshot


def _see_entries(entries: Any, snapshot: StateSnapshot) -> None:
    """Note what stands in the state, and in lists and dictionaries there."""
    if not isinstance(entries, tuple):
        snapshot.has_items(entries)
    for value in entries.values() if isinstance(entries, dict) else entries:
        if is_nest(value):
            _see_entries(value, snapshot)


def _state_entries(call: Call) -> list[Any]:
    """Per parameter the keys of its optimizer state, with values where these are no tensors."""
    return [
        tuple(
            key if isinstance(value, torch.Tensor) else (key, _known(value))
            for key, value in entries_at(of).items()
        )
        for table in _tables(call)
        for of in table.values()
    ]


def _known(value: Any) -> Any:
    """What a graph is specialized on about an entry of optimizer state that is no tensor."""
    if not is_nest(value):
        return type(value) if is_exact(value) else value
    leaves, spec = _compat.tree_flatten(value)
    return spec, [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _read_states(call: Call, inputs: Inputs) -> list[Any]:
    optimizers = call.optimizer_objects()
    found: list[Any] = []
    owner: Any = None
    entries: dict[str, Any] = {}
    for state in inputs.states:
        if (state.optimizer, id(state.parameter)) != owner:
            owner = (state.optimizer, id(state.parameter))
            state_of = optimizers[state.optimizer].state
            entries = entries_at(state_of.get(state_key(state.parameter), {}))
        found.append(value_at(entries, state.key))
    return found
