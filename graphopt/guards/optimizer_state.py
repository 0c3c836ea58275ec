"""Guards on the tensors and plain values in the state of optimizers."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from graphopt import _compat
from graphopt.guards.snapshots.snapshot import StateSnapshot
from graphopt.guards.tensors import TensorGuards
from graphopt.guards.values import tensor_kind
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, is_alias, is_exact, state_key
from graphopt.tracing.optimizers.optimizer_state import entries_at, is_nest, value_at


class StateGuards:
    """Guards on a step's optimizer state: the entries and their kinds. It is read again only if
    something may have changed.

    Args:
        tensors: know which storages the model has.

    Attributes:
        values: of the entries that the graph takes, in its order, as read last.
        unchanged: what there was when they were read.
    """

    def __init__(self, call: Call, inputs: Inputs, tensors: TensorGuards) -> None:
        self._inputs, self._tensors = inputs, tensors
        self.values = _read_states(call, inputs)
        self._kinds = [tensor_kind(value) for value in self.values]
        self._entries = _state_entries(call)
        self._tables, self.unchanged = _state_of(call)

    def mismatch(self, call: Call, known: bool = False) -> str | None:
        """Describes what changed, or returns None and stores the call's state in `values`.

        Args:
            known: `unchanged` holds.
        """
        reason = self._refresh(call, known)
        if reason is not None:
            return reason
        for state, module_tensor in self._inputs.aliases:
            if not is_alias(state.read(call), module_tensor):
                return f"{state.fqn} no longer shares storage as it did"
        return None

    def _refresh(self, call: Call, known: bool) -> str | None:
        """Reads the values again; tensors seen before are known to fit."""
        if (known or self.unchanged.holds()) and all(map(is_, _tables(call), self._tables)):
            return None
        if _state_entries(call) != self._entries:
            return "optimizer state was created, dropped or changed its kind"
        now = _read_states(call, self._inputs)
        storages = self._tensors.storages()
        for index, (value, before) in enumerate(zip(now, self.values, strict=True)):
            if value is before:
                continue
            fqn = self._inputs.states[index].fqn
            if not isinstance(value, torch.Tensor) or tensor_kind(value) != self._kinds[index]:
                return f"{fqn} changed its shape or dtype"
            if value.numel() and _compat.storage_key(value) in storages:
                return f"{fqn} shares storage with the model now"
        self.values = now
        self._tables, self.unchanged = _state_of(call)
        return None


def _tables(call: Call) -> list[dict[Any, Any]]:
    """Returns the state of each optimizer, by parameter."""
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
    """Adds optimizer state, with its lists and dictionaries, to a snapshot."""
    if not isinstance(entries, tuple):
        snapshot.has_items(entries)
    for value in entries.values() if isinstance(entries, dict) else entries:
        if is_nest(value):
            _see_entries(value, snapshot)


def _state_entries(call: Call) -> list[Any]:
    """Returns per parameter the keys of its optimizer state, with values that are no tensors."""
    return [
        tuple(
            key if isinstance(value, torch.Tensor) else (key, _known(value))
            for key, value in entries_at(of).items()
        )
        for table in _tables(call)
        for of in table.values()
    ]


def _known(value: Any) -> Any:
    """Returns the facts about a non-tensor entry of optimizer state that a graph is specialized
    on."""
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
