"""A guard that a stage's parameters and buffers are those that it was captured with."""

from __future__ import annotations

import torch
from torch import nn

from graphopt import _compat
from graphopt.graph_utils import environment
from graphopt.guards.values import change, tensor_kind


class StateGuard:
    """The parameters and buffers of a module, as they were when it was captured."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = [(name, t, tensor_kind(t), _compat.hooks_of(t)) for name, t in self._now()]
        self._places = self._shared_places()
        self._environment = environment()[2:]

    def _now(self) -> list[tuple[str, torch.Tensor]]:
        module = self._module
        return [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]

    def _shared_places(self) -> list[tuple[str, int, int]]:
        """For each tensor in a shared storage: its name, the number of the storage, and the
        offset in it."""
        distinct = {id(tensor): (name, tensor) for name, tensor in self._now()}
        members: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in distinct.values():
            members.setdefault(_compat.storage_key(tensor), []).append((name, tensor))
        shared = [(i, m) for i, m in enumerate(members.values()) if len(m) > 1]
        return [(name, i, int(t.storage_offset())) for i, m in shared for name, t in m]

    def mismatch(self) -> str | None:
        """A text about the first parameter or buffer that has changed, or None."""
        if environment()[2:] != self._environment:
            return "autocast, the default dtype or another mode of torch changed"
        now = self._now()
        if len(now) != len(self._tensors):
            return "parameters or buffers were added or removed"
        for (name, tensor, kind, hooks), (_, other) in zip(self._tensors, now, strict=True):
            if other is not tensor:
                return f"{name} was replaced by another object"
            if tensor_kind(tensor) != kind:
                return f"{name} changed{change(kind, tensor)}"
            if _compat.hooks_of(tensor) != hooks:
                return f"gradient hooks of {name} changed"
        if self._shared_places() != self._places:
            return "which parameters and buffers share storage changed"
        return None
