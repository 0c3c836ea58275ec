"""Submodules that a step replaces or adds: `self.act = nn.GELU()` in a forward.

A module that the model has had is put there by every call. One that the step makes, with no tensors
in it, is that of the trace in every call, and stays where one like it stands already: so the graph
that is captured next holds from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.guards.values import same_constant
from graphopt.tracing.outside.places import MISSING
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.tensors.attributes import AttributeChange


class Registered:
    """What is registered in a module when a step begins.

    Args:
        name: of the module; empty for the model.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._names = _names_of_tensors(module)
        self._modules = dict(_compat.own_modules(module))

    def replaced(self, known: Collection[nn.Module]) -> Iterator[AttributeChange]:
        """Submodules that are others now, or are new.

        Args:
            known: the modules that the step has found.

        Raises:
            CaptureError: the step has registered or removed something else, or has put a module
                there that it has made with tensors.
        """
        table: dict[str, Any] = _compat.own_modules(self._module)
        kept = list(table)[: len(self._modules)] == list(self._modules)
        parameters, buffers = _names_of_tensors(self._module)
        all_kept = kept and self._names[1] == buffers[: len(self._names[1])]
        if not all_kept or self._names[0] != parameters:
            raise self._refused("it registers parameters, or removes something, of")
        for key, after in table.items():
            before = self._modules.get(key, MISSING)
            if after is before:
                continue
            if after is not None and after not in known:
                if not _is_bare(after, known):
                    raise self._refused(f"it makes a module with tensors, {key!r}, in each call of")
                if _is_alike(before, after):
                    continue
            yield AttributeChange(table, key, f"{self._name}.{key}".strip("."), before, after)

    def _refused(self, what: str) -> CaptureError:
        return CaptureError(f"{what} {self._name or 'the model'}", hint="do that outside the step")


def _names_of_tensors(module: nn.Module) -> tuple[list[str], list[str]]:
    return list(_compat.own_parameters(module)), list(_compat.own_buffers(module))


def _is_bare(module: nn.Module, known: Collection[nn.Module]) -> bool:
    """Whether a module has no tensors, registered or in attributes, but those of known ones."""
    made = (each for each in module.modules() if each not in known)
    leaves = (leaf for each in made for leaf in _compat.tree_leaves(vars(each)))
    return not any(isinstance(leaf, (torch.Tensor, *SYMBOLIC)) for leaf in leaves)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two modules compute the same, with no tensors but those that both have."""
    if one is other:
        return True
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    return all(_is_same(value, vars(other)[key]) for key, value in vars(one).items())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, nn.Module):
        return _is_alike(one, other)
    if isinstance(one, dict) and type(one) is type(other):
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return same_constant(one, other)
