"""Parameters, buffers and constants of a model: names, ties, and their place in modules."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from graphopt._compat import pipelining as _compat


class ModelTensors:
    """The tensors that an exported model reads, by their qualified names in the model."""

    def __init__(self, module: nn.Module, traced: fx.GraphModule) -> None:
        self._traced = traced
        self._named: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._hidden = _compat.non_persistent_buffers(module)

    def names(self) -> list[str]:
        """All names of parameters and buffers, ties included."""
        return list(self._named)

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, a parameter or a constant of the trace; None for a graph."""
        if name in self._named:
            return self._named[name]
        value = operator.attrgetter(name)(self._traced)
        return value if isinstance(value, torch.Tensor) else None

    def aliases(self, name: str) -> list[str]:
        """All names of one tensor: several if parameters are tied."""
        tensor = self.tensor(name)
        return [other for other, t in self._named.items() if t is tensor] or [name]

    def is_parameter(self, name: str) -> bool:
        return isinstance(self.tensor(name), nn.Parameter)

    def place(self, target: nn.Module, name: str) -> None:
        """Registers the tensor or graph of `name` in `target`, under the same name."""
        *path, leaf = name.split(".")
        for part in path:
            if part not in _compat.children_by_name(target):
                target.add_module(part, nn.Module())
            target = target.get_submodule(part)
        tensor = self.tensor(name)
        if tensor is None:
            target.add_module(leaf, self._traced.get_submodule(name))
        elif isinstance(tensor, nn.Parameter):
            target.register_parameter(leaf, tensor)
        else:
            persistent = name in self._named and name not in self._hidden
            target.register_buffer(leaf, tensor, persistent=persistent)
