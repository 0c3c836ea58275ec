"""Guards on the modules that a step is given or uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt.guards.snapshots.snapshot import StateSnapshot, body_of, is_body
from graphopt.guards.values import change, is_plain, items, same_constant, same_items, tensor_kind

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_OF_TORCH = frozenset({"training", "_parameters", "_buffers", "_modules", *_HOOKS})
"""Attributes of modules that have guards of their own."""

_OF_HOOKS = frozenset(
    {"_forward_hooks_with_kwargs", "_forward_hooks_always_called",
     "_forward_pre_hooks_with_kwargs"}
)  # fmt: skip
"""Torch's tables that mark hooks of other tables, under keys of their own."""


class ModuleGuards:
    """Guards on all modules of a step. Single modules are checked only if a joint check fails.

    Args:
        modules: what each guard is made of.

    Attributes:
        unchanged: what there was when they were looked at last; None where something had changed.
    """

    def __init__(self, modules: Iterable[tuple[Any, ...]]) -> None:
        self._guards = [ModuleGuard(*each) for each in modules]
        self.unchanged: StateSnapshot | None = self._snapshot()

    def mismatches(self) -> Iterator[str]:
        """Yields descriptions of what has changed."""
        if self.unchanged is not None and self.unchanged.holds():
            return
        found = (guard.mismatch() for guard in self._guards)
        reasons = [reason for reason in found if reason is not None]
        self.unchanged = None if reasons else self._snapshot()
        yield from reasons

    def forget(self) -> None:
        """Drops all snapshots, so that nothing is kept alive."""
        self._guards = []
        if self.unchanged is not None:
            self.unchanged.forget()
            self.unchanged = None

    def _snapshot(self) -> StateSnapshot:
        snapshot = StateSnapshot()
        for guard in self._guards:
            guard.describe(snapshot)
        return snapshot


class ModuleGuard:
    """Guard on one module: mode, hooks, registered tensors by identity, plain attributes by value,
    others by identity.

    Args:
        assigned: attributes that the step itself sets: a new object in one of them is its own.
        inputs: attributes whose numbers the graph takes.
        filled: dictionaries into which the step puts tensors (by id).
        moving: buffers that may be others in each call: tables, by id, and keys.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        assigned: Collection[str],
        inputs: Collection[str] = (),
        filled: Collection[int] = (),
        moving: Set[tuple[int, str]] = frozenset(),
    ) -> None:
        self.name = name or "the model"
        self.attributes = vars(module)
        self.training = module.training
        self.hooks = self._hooks()
        self.children = [(key, body_of(m)) for key, m in _compat.own_modules(module).items()]
        self.tensors = [
            (
                table,
                [
                    (key, t, None if t is None else tensor_kind(t))
                    for key, t in table.items()
                    if (id(table), key) not in moving
                ],
                len(table),
            )
            for table in (_compat.own_parameters(module), _compat.own_buffers(module))
        ]
        self.hooks_of_gradients = self._hooks_of_gradients()
        self.others = [
            (key, value, None if id(value) in filled or key in _OF_HOOKS else items(value))
            for key, value in self.attributes.items()
            if key not in _OF_TORCH and not isinstance(value, torch.Tensor)
            if (is_plain(value) or key not in assigned) and key not in inputs
        ]
        self.count = len(self.attributes)

    def mismatch(self) -> str | None:
        """Describes what changed about the module, or returns None."""
        attributes = self.attributes
        if attributes["training"] is not self.training:
            return f"{self.name}.training became {attributes['training']}"
        modules = attributes["_modules"]
        if len(modules) != len(self.children):
            return self._registered(modules.keys() ^ {key for key, _ in self.children})
        for key, child in self.children:
            if key not in modules or not is_body(modules[key], child):
                return f"submodule {self.name}.{key} was replaced"
        for table, entries, count in self.tensors:
            if len(table) != count:
                return self._registered(table.keys() ^ {key for key, _, _ in entries})
            for key, tensor, kind in entries:
                now = table.get(key)
                if now is not tensor:
                    return f"{self.name}.{key} was replaced{change(kind, now)}"
                if tensor is not None and tensor_kind(tensor) != kind:
                    return f"{self.name}.{key}{change(kind, tensor)}"
        if self._hooks_of_gradients() != self.hooks_of_gradients:
            return f"gradient hooks of {self.name} changed"
        for key, value, contents in self.others:
            now = attributes.get(key, _MISSING)
            if now is not value and not same_constant(now, value):
                return f"{self.name}.{key} became {now!r}"
            if contents is not None and not same_items(contents, now):
                return f"the contents of {self.name}.{key} changed"
        if len(attributes) != self.count:
            return f"attributes of {self.name} were added or removed"
        if self._hooks() != self.hooks:
            return f"hooks of {self.name} changed"
        return None

    def describe(self, snapshot: StateSnapshot) -> None:
        """Adds the present state that `mismatch` checks to a snapshot."""
        attributes = self.attributes
        looked_at = {key: attributes[key] for key in attributes if key in _OF_TORCH}
        looked_at.update((key, attributes[key]) for key, _, _ in self.others)
        _see(attributes, looked_at, snapshot)
        for table, entries, _ in self.tensors:
            _see(table, {key: tensor for key, tensor, _ in entries}, snapshot)
            for _, tensor, _ in entries:
                if tensor is not None:
                    snapshot.has_kind(tensor)
        for hooks in (attributes[key] for key in _HOOKS):
            snapshot.has_keys(hooks)
        snapshot.has_modules(attributes["_modules"])
        for key, _, contents in self.others:
            if contents is not None:
                snapshot.has_items(attributes[key])

    def _hooks(self) -> list[tuple[Any, ...]]:
        return [tuple(self.attributes[table]) for table in _HOOKS]

    def _hooks_of_gradients(self) -> list[tuple[int, ...]]:
        """Returns the keys of the hooks of each parameter."""
        parameters = self.attributes["_parameters"].values()
        return [() if each is None else _compat.hooks_of(each) for each in parameters]

    def _registered(self, names: set[str]) -> str:
        listed = ", ".join(f"{self.name}.{name}" for name in sorted(names))
        return f"{listed} was registered or dropped"


def _see(table: dict[str, Any], looked_at: dict[str, Any], snapshot: StateSnapshot) -> None:
    """Adds a dictionary's required contents to a snapshot, except items that may vary from call to
    call."""
    if len(looked_at) == len(table):
        snapshot.has_items(table)
        return
    snapshot.has_size(table)
    for key, value in looked_at.items():
        snapshot.has(table, key, value)


_MISSING = object()
