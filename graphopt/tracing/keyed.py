"""Dictionaries and sets in which a step looks for tensors: `optimizers[parameter].step()`.

A tensor is known by its identity, and while a step is traced another one stands for it. Containers
of the program's whose keys are inputs of the step have the stand-ins for keys meanwhile, and `id`
says of a stand-in what it says of the tensor.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt.tracing import contents
from graphopt.tracing.contents import ObjectKind
from graphopt.tracing.replace import replaced
from graphopt.tracing.source import is_own_file, is_torch_file

Keyed = tuple[ObjectKind, Any]
"""A dictionary or a set, with its kind."""


def keyed_by_tensors(held: Sequence[tuple[ObjectKind, Any, Any]]) -> Iterator[Keyed]:
    """The dictionaries and sets whose keys are tensors, among objects given with what they hold;
    without the state of optimizers, which has stand-ins of its own."""
    states = {
        id(table["state"])
        for kind, table, _ in held
        if kind is contents.TABLE and "state" in table and "param_groups" in table
    }
    for kind, holder, content in held:
        keys = _keys(kind, content) if kind in (contents.TABLE, contents.SET) else ()
        if any(isinstance(key, torch.Tensor) for key in keys) and id(holder) not in states:
            yield kind, holder


def _keys(kind: ObjectKind, content: Any) -> Any:
    return content[0] if kind is contents.TABLE else content


@contextmanager
def identified(tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While active, `id` of a stand-in is that of the tensor.

    Args:
        tensors: by the ids of their stand-ins.
    """
    with replaced((builtins, "id", _identity(tensors))):
        yield


@contextmanager
def keyed_by_stand_ins(
    containers: Sequence[Keyed],
    stand_ins: Mapping[int, torch.Tensor],
    tensors: Mapping[int, torch.Tensor],
) -> Iterator[None]:
    """While active, these containers have stand-ins for keys.

    Args:
        stand_ins: by the ids of the tensors.
        tensors: by the ids of their stand-ins.
    """
    for kind, holder in containers:
        _exchange(kind, holder, stand_ins)
    try:
        yield
    finally:
        for kind, holder in containers:
            _exchange(kind, holder, tensors)


def _exchange(kind: ObjectKind, holder: Any, others: Mapping[int, torch.Tensor]) -> None:
    """Put other keys into a container, in the same order."""
    content = kind.read(holder)
    keys = [others.get(id(key), key) for key in _keys(kind, content)]
    kind.write(holder, (keys, content[1]) if kind is contents.TABLE else frozenset(keys))


def _identity(tensors: Mapping[int, torch.Tensor]) -> Any:
    own = builtins.id

    def identity(value: Any) -> int:
        tensor = tensors.get(own(value))
        if tensor is None:
            return own(value)
        file = sys._getframe(1).f_code.co_filename
        return own(value if is_torch_file(file) or is_own_file(file) else tensor)

    return identity
