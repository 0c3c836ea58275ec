"""When a captured graph may be used again, and if not, why not.

`make_fx` specializes without saying on what. These guards hold everything a step is specialized
on: the arguments, the modules, the optimizers' settings, and torch's modes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.tracing.call import Call
from graphopt.tracing.inputs import Inputs, Storage, is_number
from graphopt.tracing.numbers import SCHEDULED, holds
from graphopt.tracing.signature import AttributeResult

_PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Entries that learning rate schedulers keep in parameter groups, and optimizers never read."""

_OF_TORCH = frozenset({"training", "_parameters", "_buffers", "_modules", *_HOOKS})
"""Attributes of modules that have guards of their own."""


def tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a graph is specialized on about a tensor."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _environment() -> tuple[Any, ...]:
    """Modes of torch that change what operators run."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


class ModuleGuard:
    """One module: mode, hooks, registered tensors by identity, plain attributes by value, others by
    identity.

    Args:
        assigned: attributes that the step itself sets: a new object in one of them is its own.
    """

    def __init__(self, name: str, module: nn.Module, assigned: Collection[str]) -> None:
        self.name = name or "the model"
        self.attributes = vars(module)
        self.training = module.training
        self.hooks = tuple(tuple(self.attributes[table]) for table in _HOOKS)
        self.children = [(key, vars(m)) for key, m in module._modules.items() if m is not None]
        self.tensors = [
            (table, [(key, t, None if t is None else tensor_kind(t)) for key, t in table.items()])
            for table in (module._parameters, module._buffers)
        ]
        self.submodules = list(module._modules)
        self.gradients = [
            (p.requires_grad, _compat.hooks_of(p))
            for p in module._parameters.values()
            if p is not None
        ]
        self.others = [
            (key, value, _items(value))
            for key, value in self.attributes.items()
            if key not in _OF_TORCH and not isinstance(value, torch.Tensor)
            if _is_plain(value) or key not in assigned
        ]
        self.count = len(self.attributes)

    def mismatch(self) -> str | None:
        attributes = self.attributes
        if attributes["training"] is not self.training:
            return f"{self.name}.training became {attributes['training']}"
        modules = attributes["_modules"]
        if len(modules) != len(self.submodules):
            return self._registered(modules.keys() ^ set(self.submodules))
        for key, child in self.children:
            if key not in modules or vars(modules[key]) is not child:
                return f"submodule {self.name}.{key} was replaced"
        for table, entries in self.tensors:
            if len(table) != len(entries):
                return self._registered(table.keys() ^ {key for key, _, _ in entries})
            for key, tensor, kind in entries:
                now = table.get(key)
                if now is not tensor:
                    return f"{self.name}.{key} was replaced{_change(kind, now)}"
                if tensor is not None and tensor_kind(tensor) != kind:
                    return f"{self.name}.{key}{_change(kind, tensor)}"
        parameters = (p for p in attributes["_parameters"].values() if p is not None)
        for (flag, hooks), parameter in zip(self.gradients, parameters, strict=True):
            if parameter.requires_grad is not flag:
                return f"requires_grad changed in {self.name}"
            if _compat.hooks_of(parameter) != hooks:
                return f"gradient hooks of {self.name} changed"
        for key, value, items in self.others:
            now = attributes.get(key, _MISSING)
            if now is not value and not _same_constant(now, value):
                return f"{self.name}.{key} became {now!r}"
            if items is not None and not _same_items(items, now):
                return f"what {self.name}.{key} contains changed"
        if len(attributes) != self.count:
            return f"attributes of {self.name} were added or removed"
        if tuple(tuple(attributes[table]) for table in _HOOKS) != self.hooks:
            return f"hooks of {self.name} changed"
        return None

    def _registered(self, names: set[str]) -> str:
        listed = ", ".join(f"{self.name}.{name}" for name in sorted(names))
        return f"{listed} was registered or dropped"


def _change(kind: tuple[Any, ...] | None, now: Any) -> str:
    if kind is None or not isinstance(now, torch.Tensor) or tensor_kind(now) == kind:
        return ""
    return f" ({_describe(kind, tensor_kind(now))})"


_MISSING = object()


class OptimizerGuard:
    """One optimizer: groups, members, settings that are not scheduled, and state entries."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.type = type(optimizer)
        self.groups = [
            (list(group["params"]), _settings(group)) for group in optimizer.param_groups
        ]

    def mismatch(self, optimizer: Optimizer) -> str | None:
        if type(optimizer) is not self.type:
            return f"{self.name} became a {type(optimizer).__name__}"
        if len(optimizer.param_groups) != len(self.groups):
            return f"{self.name} has {len(optimizer.param_groups)} parameter groups now"
        for index, (params, settings) in enumerate(self.groups):
            group = optimizer.param_groups[index]
            live = group["params"]
            if len(live) != len(params) or any(
                a is not b for a, b in zip(live, params, strict=True)
            ):
                return f"the members of {self.name}.param_groups[{index}] changed"
            now = _settings(group)
            if now != settings:
                key = next(k for k in now.keys() | settings.keys() if now.get(k) != settings.get(k))
                return f"{self.name}.param_groups[{index}][{key!r}] became {now.get(key)!r}"
        return None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group that the graph is specialized on; scheduled numbers by kind only.

    Bookkeeping of schedulers (`initial_lr`, `max_lr`, …) is not read by optimizers.
    """
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params" or key in _OF_SCHEDULERS:
            continue
        if key not in SCHEDULED:
            found[key] = value if _is_plain(value) else id(value)
        elif isinstance(value, tuple):
            found[key] = tuple(is_number(part) or id(part) for part in value)
        else:
            found[key] = is_number(value) or id(value)
    return found


class Guards:
    """Everything one captured graph depends on."""

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        mode: tuple[Any, ...],
        attributes: Sequence[AttributeResult] = (),
    ) -> None:
        assigned: dict[int, set[str]] = {}
        for result in attributes:
            assigned.setdefault(id(result.attributes), set()).add(result.name)
        self.mode = mode
        self.environment = _environment()
        self.treespec = call.treespec
        self.modules = [
            ModuleGuard(name, m, assigned.get(id(vars(m)), ()))
            for name, m in call.named_submodules()
        ]
        # A cached graph must not keep a model alive that the user has dropped.
        self.roots = [weakref.ref(call.leaves[position]) for position in call.modules]
        self.optimizers = [
            OptimizerGuard(call.names[position], call.leaves[position])
            for position in call.optimizers
        ]
        self.constants = [call.leaves[position] for position in call.constants]
        self.positions = _positions(call)
        user = set(inputs.user)
        self.user = [(p, tensor_kind(call.leaves[p])) for p in inputs.user]
        self.shared = [(p, call.leaves[p]) for p in call.tensors if p not in user]
        self.aliases = _aliases(call)
        self.rebindable = [
            (entry, entry.slots[0], tensor_kind(entry.tensor))
            for entry in inputs.module_tensors
            if entry.rebindable
        ]
        self.storages = [(h, _layout(h)) for h in inputs.placeholders if isinstance(h, Storage)]
        self.inputs = inputs
        self.states = _read_states(call, inputs)
        self.state_kinds = [tensor_kind(value) for value in self.states]
        self.state_entries = _state_entries(call)
        self.gradients = [entry.tensor.grad is not None for entry in inputs.parameters]

    def alive(self) -> bool:
        """Whether the modules still exist."""
        return all(root() is not None for root in self.roots)

    def structure_mismatch(self, call: Call, mode: tuple[Any, ...]) -> str | None:
        """The first thing that all ranks see alike and that is no longer as captured."""
        return next(self.structure_mismatches(call, mode), None)

    def structure_mismatches(self, call: Call, mode: tuple[Any, ...]) -> Iterator[str]:
        """All such things, where they can be told apart."""
        if mode != self.mode:
            yield f"{mode} in place of {self.mode}"
        if call.treespec != self.treespec or _positions(call) != self.positions:
            yield "the structure of the arguments changed"
            return
        if _environment() != self.environment:
            yield "grad mode, autocast or another mode of torch changed"
        for root, position in zip(self.roots, call.modules, strict=True):
            if call.leaves[position] is not root():
                yield f"{call.names[position]} is another module"
                return
        for guard in self.modules:
            reason = guard.mismatch()
            if reason is not None:
                yield reason
        for settings, position in zip(self.optimizers, call.optimizers, strict=True):
            reason = settings.mismatch(call.leaves[position])
            if reason is not None:
                yield reason

    def local_mismatch(self, call: Call) -> str | None:
        """The first thing that may differ on this rank alone and is no longer as captured."""
        for value, position in zip(self.constants, call.constants, strict=True):
            if not _same_constant(call.leaves[position], value):
                return f"argument {call.names[position]} became {call.leaves[position]!r}"
        if _state_entries(call) != self.state_entries:
            return "optimizer state was created, dropped or changed its kind"
        for entry, existed in zip(self.inputs.parameters, self.gradients, strict=True):
            if (entry.tensor.grad is not None) is not existed:
                return f"{entry.fqn}.grad {'is gone' if existed else 'exists now'}"
        optimizers = call.optimizer_objects()
        for number in self.inputs.hyperparameters:
            value = number.read(optimizers[number.optimizer].param_groups)
            if not all(holds(value, predicate) for predicate in number.asked.predicates):
                return f"{number.fqn} became {value}"
        reason = self._refresh_states(call)
        if reason is not None:
            return reason
        for entry, (owner, key), kind in self.rebindable:
            tensor = owner.get(key)
            if not isinstance(tensor, torch.Tensor) or tensor_kind(tensor) != kind:
                return f"{entry.fqn} became {tensor!r}"
        for holder, layout in self.storages:
            if _layout(holder) != layout:
                return f"{holder.fqn} no longer shares storage as it did"
        for position, tensor in self.shared:
            if call.leaves[position] is not tensor:
                return f"argument {call.names[position]} is another tensor"
        return None

    def _refresh_states(self, call: Call) -> str | None:
        """Read the optimizer state into `states`; tensors seen before are known to fit."""
        now = _read_states(call, self.inputs)
        for index, (value, before) in enumerate(zip(now, self.states, strict=True)):
            if value is before:
                continue
            if not isinstance(value, torch.Tensor) or tensor_kind(value) != self.state_kinds[index]:
                return f"{self.inputs.states[index].fqn} changed its shape or dtype"
        self.states = now
        return None

    def shape_mismatch(self, call: Call) -> str | None:
        """The first tensor argument that is of another kind than captured."""
        for position, kind in self.user:
            now = tensor_kind(call.leaves[position])
            if now != kind:
                return f"argument {call.names[position]}: {_describe(kind, now)}"
            if kind[-1] and call.leaves[position].grad is not None:
                return f"argument {call.names[position]} has a gradient"
        if _aliases(call) != self.aliases:
            return "which tensor arguments are the same changed"
        return None


def _items(value: object) -> list[Any] | None:
    """What a list or dictionary contains, to compare with later."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list) else None


def _same_items(before: list[Any], container: object) -> bool:
    now = _items(container)
    if now is None or len(now) != len(before):
        return False
    return all(a is b or _same_constant(a, b) for a, b in zip(now, before, strict=True))


def _same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and _is_plain(a) and _is_plain(b) and bool(a == b)


def _is_plain(value: object) -> bool:
    """Whether a value is compared by value; all others are by identity."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _layout(holder: Storage) -> list[int]:
    """Where the members of a storage lie: their offsets, -1 for one that has left it."""
    first = _compat.storage_key(holder.members[0].tensor)
    return [
        int(tensor.storage_offset()) if _compat.storage_key(tensor) == first else -1
        for tensor in (member.tensor for member in holder.members)
    ]


def _positions(call: Call) -> tuple[list[Any], ...]:
    return (call.modules, call.optimizers, call.tensors, call.constants, call.repeats)


def _aliases(call: Call) -> tuple[int, ...]:
    """For each tensor argument the first position of the same tensor, and of the same storage."""
    first: dict[Any, int] = {}
    found = []
    for position in call.tensors:
        tensor = call.leaves[position]
        found.append(first.setdefault(id(tensor), position))
        found.append(first.setdefault(("storage", _compat.storage_key(tensor)), position))
    return tuple(found)


def _state_entries(call: Call) -> list[Any]:
    """Per parameter the keys of its optimizer state, with values where these are no tensors."""
    return [
        tuple(
            key if isinstance(value, torch.Tensor) else (key, value)
            for key, value in entries.items()
        )
        for optimizer in call.optimizer_objects()
        for entries in optimizer.state.values()
    ]


def _read_states(call: Call, inputs: Inputs) -> list[Any]:
    optimizers = call.optimizer_objects()
    found: list[Any] = []
    owner: Any = None
    entries: dict[str, Any] = {}
    for state in inputs.states:
        if (state.optimizer, id(state.parameter)) != owner:
            owner = (state.optimizer, id(state.parameter))
            entries = optimizers[state.optimizer].state.get(state.parameter.tensor, {})
        found.append(entries.get(state.key))
    return found


def _describe(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    names = ("shape", "stride", "dtype", "device", "requires_grad")
    differing = _differing(names, before, now)
    name, old, new = next(differing)
    if isinstance(old, torch.Size):
        old, new = list(old), list(new)
    return f"{name} {old} became {new}"


def _differing(
    names: tuple[str, ...], before: tuple[Any, ...], now: tuple[Any, ...]
) -> Iterator[tuple[str, Any, Any]]:
    return ((n, a, b) for n, a, b in zip(names, before, now, strict=True) if a != b)
