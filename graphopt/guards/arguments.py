"""Guards on the arguments of a call: the positions, kinds and values of tensors and constants, and
which arguments are the same object."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch

from graphopt import _compat
from graphopt.guards.tensors import TensorGuards
from graphopt.guards.values import describe, gradient_kind, is_plain, same_constant, tensor_kind
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs
from graphopt.tracing.rollback.nests import containers_in
from graphopt.tracing.tensors.lost_history import is_left


class ArgumentGuards:
    """The facts about arguments, except modules and optimizers, that a graph is specialized on.

    Args:
        tensors: know which storages the model has.
        others: positions of objects that are guarded as those outside the arguments are.
        found: tensors that the step finds outside the arguments.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        tensors: TensorGuards,
        others: Iterable[int] = (),
        found: Iterable[torch.Tensor] = (),
    ) -> None:
        outside = set(map(id, found))
        self._outside = [
            (position, weakref.ref(call.leaves[position]))
            for position in inputs.user
            if id(call.leaves[position]) in outside
        ]
        self._same = _same_containers(call)
        self._tensors = tensors
        self._treespec = call.treespec
        self._positions = _positions(call)
        numbers = (n for n in inputs.hyperparameters if isinstance(n, ArgumentNumber))
        self._found_anew = {number.position for number in numbers}
        self._found_anew.update(others)
        self._found_anew.update(call.objects.roots)
        user = set(inputs.user)
        self._user = [
            (p, tensor_kind(call.leaves[p]), gradient_kind(call.leaves[p])) for p in inputs.user
        ]
        plain = all(gradient is None and kind[-1] is None for _, kind, gradient in self._user)
        given = [call.leaves[position] for position in inputs.user]
        self._match = _compat.metadata_match(given) if plain and given else None
        entries = {id(entry.tensor): entry for entry in inputs.module_tensors}
        self._shared = [(p, entries[id(call.leaves[p])]) for p in call.tensors if p not in user]
        self._aliases = _aliases(call, tensors.storages())
        self._objects = call.objects.structure
        self._constants = [
            None if p in self._found_anew else call.leaves[p] for p in call.constants
        ]

    def same_structure(self, call: Call) -> bool:
        """True if arguments of the same sorts stand at the same positions."""
        same = call.treespec is self._treespec or call.treespec == self._treespec
        same = same and call.objects.structure == self._objects
        return same and _positions(call) == self._positions

    def constant_mismatch(self, call: Call) -> str | None:
        """Returns a description of the first constant that changed, or None."""
        for value, position in zip(self._constants, call.constants, strict=True):
            if position not in self._found_anew and not same_constant(call.leaves[position], value):
                return f"argument {call.names[position]} became {call.leaves[position]!r}"
        return None

    def shape_mismatch(self, call: Call) -> str | None:
        """Describes the first tensor of another kind than captured, or that differs from the one
        the step finds elsewhere; None if all fit."""
        for position, tensor in self._outside:
            if call.leaves[position] is not tensor():
                return f"argument {call.names[position]} is no longer the tensor found elsewhere"
        change = None if self._are_alike(call) else self._changed_tensor(call)
        if change is not None:
            return change
        if _aliases(call, self._tensors.storages()) != self._aliases:
            return "tensor arguments that were one object differ, or the reverse"
        if len(self._same) > 1 and _same_containers(call) != self._same:
            return "lists or dictionaries that were one object differ, or the reverse"
        return None

    def _are_alike(self, call: Call) -> bool:
        """True if the user's tensors are seen at once to be as those that were captured."""
        tensors = [call.leaves[position] for position, _, _ in self._user]
        return (
            self._match is not None
            and self._match(*tensors)
            and all(map(_IS_LEAF, tensors))  # of others torch warns that nobody should ask
            and not any(map(is_not, map(_GRADIENT, tensors), repeat(None)))
            and not any(map(is_left, tensors))
        )

    def _changed_tensor(self, call: Call) -> str | None:
        for position, kind, gradient in self._user:
            now = tensor_kind(call.leaves[position])
            if now != kind:
                return f"argument {call.names[position]}: {describe(kind, now)}"
            if gradient_kind(call.leaves[position]) != gradient:
                return f"the gradient of argument {call.names[position]} came, went or changed"
        return None

    def identity_mismatch(self, call: Call) -> str | None:
        """Describes the first argument that was a module's tensor and is now another one, or
        returns None."""
        for position, entry in self._shared:
            if call.leaves[position] is not entry.live():
                return f"argument {call.names[position]} is another tensor"
        return None

    def same_objects(self, call: Call) -> bool:
        """True if a call has the same objects as arguments, besides tensors and plain values."""
        if call.constants != self._positions[3]:
            return False
        given = zip(self._constants, call.constants, strict=True)
        return all(
            is_plain(value) or at in self._found_anew or call.leaves[at] is value
            for value, at in given
        )


_GRADIENT, _IS_LEAF = attrgetter("grad"), attrgetter("is_leaf")


def _positions(call: Call) -> tuple[list[Any], ...]:
    return (call.modules, call.optimizers, call.tensors, call.constants, call.repeats)


def _same_containers(call: Call) -> list[int]:
    """Returns for each list and dictionary argument the index of the first one that is the same
    object."""
    first: dict[int, int] = {}
    found = (container for _, container in containers_in(*call.given))
    return [first.setdefault(id(each), number) for number, each in enumerate(found)]


def _aliases(call: Call, module_storages: frozenset[int]) -> tuple[int, ...]:
    """Returns for each tensor argument the first position of the same tensor and of the same
    storage, and if a module shares the storage."""
    first: dict[Any, int] = {}
    found = []
    for position in call.tensors:
        tensor = call.leaves[position]
        key = _compat.storage_key(tensor)
        found.append(first.setdefault(id(tensor), position))
        found.append(first.setdefault(("storage", key), position))
        found.append(key in module_storages)
    return tuple(found)
