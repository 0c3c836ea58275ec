"""Guards on modules' parameters, buffers and tensor attributes: identity of those that are no
inputs, gradients, user-set attributes, and shared storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping
from operator import attrgetter
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.identity import identities
from graphopt.guards.values import same_constant, tensor_kind
from graphopt.tracing.call import Call, has_gradient
from graphopt.tracing.inputs.entries import Inputs, ModuleTensor, Storage
from graphopt.tracing.tensors.lost_history import accumulates


class TensorGuards:
    """Guards on the module tensors of a step; registered ones are checked by `ModuleGuard`.

    Args:
        dropped: tensors, by number, whose gradients the step drops if there are any.
    """

    def __init__(self, call: Call, inputs: Inputs, dropped: Collection[int]) -> None:
        self._inputs = inputs
        self._moving = [inputs.module_tensors[index] for index in inputs.rebound]
        moving = set(map(id, self._moving))
        self._fixed_storages = frozenset(
            _compat.storage_key(h.tensor) for h in inputs.module_tensors if id(h) not in moving
        )
        self._rebindable = [
            (entry, entry.slots[0], tensor_kind(entry.tensor))
            for entry in inputs.module_tensors
            if entry.rebindable
        ]
        # The `__dict__` of each tensor: reading a lazy parameter's attribute would be a use of it.
        marks = [(entry, vars(entry.tensor)) for entry in inputs.module_tensors]
        inside = {(id(owner), key) for _, (owner, key), _ in self._rebindable}
        self._marked = [
            (entry, now, {key: _INPUT if (id(now), key) in inside else now[key] for key in now})
            for entry, now in marks
            if now
        ]
        self._unmarked = [attributes for _, attributes in marks if not attributes]
        self._attributes = list(_attribute_slots(call, inputs))
        self._sharing = _sharing(call, inputs) if self._rebindable else []
        self._storages = [(h, _layout(h)) for h in inputs.placeholders if isinstance(h, Storage)]
        self._parameters = [
            entry
            for index, entry in enumerate(inputs.module_tensors)
            if index not in dropped
            if entry.kind == "parameter" or accumulates(entry.tensor)
        ]
        self._parameters.sort(key=lambda entry: entry.rebindable)
        self._same_parameters = [e.tensor for e in self._parameters if not e.rebindable]
        self._other_parameters = [e.slots[0] for e in self._parameters if e.rebindable]
        self._gradients = self._gradients_now()
        plain = not (self._other_parameters or any(self._gradients))
        self._without = identities([None] * len(self._same_parameters)) if plain else None

    def storages(self) -> frozenset[int]:
        """Returns the storages of all module tensors; some tensors get others in each call."""
        if not self._moving:
            return self._fixed_storages
        return self._fixed_storages | {_compat.storage_key(h.live()) for h in self._moving}

    def gradient_mismatch(self) -> str | None:
        """Describes the first gradient that was added or removed, or returns None."""
        if self._without == identities(map(_GRADIENT, self._same_parameters)):
            return None
        now = self._gradients_now()
        if now == self._gradients:
            return None
        index = next(i for i, there in enumerate(now) if there is not self._gradients[i])
        what = "exists now" if now[index] else "is gone"
        return f"{self._parameters[index].fqn}.grad {what}"

    def mismatch(self, call: Call) -> str | None:
        """Describes the first tensor that changed, or returns None."""
        for entry, (owner, key), kind in self._rebindable:
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
        return self._changed_storage(call)

    def _changed_storage(self, call: Call) -> str | None:
        if self._rebindable and _sharing(call, self._inputs) != self._sharing:
            return f"{self._rebindable[0][0].fqn} or another such tensor shares storage otherwise"
        for holder, layout in self._storages:
            if _layout(holder) != layout:
                return f"{holder.fqn} no longer shares storage as it did"
        return None

    def _gradients_now(self) -> list[bool]:
        """Returns for each parameter, and each tensor used like one, True if it has a gradient."""
        there = [gradient is not None for gradient in map(_GRADIENT, self._same_parameters)]
        for owner, key in self._other_parameters:
            tensor = owner.get(key)
            there.append(isinstance(tensor, torch.Tensor) and has_gradient(tensor))
        return there


_GRADIENT = attrgetter("grad")

_INPUT: Any = object()
"""A placeholder for a parameter's attribute that is an input and may vary from call to call."""


def _layout(holder: Storage) -> list[int]:
    """Returns the offsets of a storage's members; -1 for one that moved to another storage."""
    first = _compat.storage_key(holder.members[0].live())
    return [
        int(tensor.storage_offset()) if _compat.storage_key(tensor) == first else -1
        for tensor in (member.live() for member in holder.members)
    ]


def _same_marks(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """True if a tensor has the same user-set attributes."""
    return now.keys() == before.keys() and all(
        value is _INPUT or now[name] is value or same_constant(now[name], value)
        for name, value in before.items()
    )


def _attribute_slots(
    call: Call, inputs: Inputs
) -> Iterator[tuple[ModuleTensor, MutableMapping[str, Any], str]]:
    """Yields attributes, other than parameters and buffers, whose tensor is also found
    elsewhere."""
    registered = {
        id(table) for _, module in call.named_submodules() for table in _compat.own_tables(module)
    }
    for entry in inputs.module_tensors:
        for owner, key in entry.slots:
            if not entry.rebindable and id(owner) not in registered:
                yield entry, owner, key


def _sharing(call: Call, inputs: Inputs) -> list[int]:
    """Returns for each tensor the index of the first one with the same storage."""
    tensors = [entry.live() for entry in inputs.module_tensors]
    tensors += [call.leaves[position] for position in inputs.user]
    first: dict[int, int] = {}
    return [first.setdefault(_compat.storage_key(t), i) for i, t in enumerate(tensors)]
