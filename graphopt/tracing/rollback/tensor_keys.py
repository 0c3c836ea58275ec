"""Dictionaries and sets whose keys are tensors, used in a trace with stand-ins as keys.

A tensor is known by its identity, and while a step is traced another one stands for it. Containers
of the program's whose keys are inputs of the step have the stand-ins for keys as well meanwhile;
`id` and `hash` say of a stand-in what they say of the tensor.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt._compat.storages import STORAGES
from graphopt.ir.user_frames import is_own_file, is_torch_file
from graphopt.tracing.interception.replaced_functions import calling_frame, replaced
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.unknown_features import refuse_address
from graphopt.tracing.rollback import contents
from graphopt.tracing.rollback.contents import ObjectKind

Keyed = tuple[ObjectKind, Any]
"""A dictionary or a set, with its kind."""


def keyed_by_tensors(held: Sequence[tuple[ObjectKind, Any, Any]]) -> Iterator[Keyed]:
    """The dictionaries and sets whose keys are tensors, except optimizer state."""
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
    """While active, `id` and `hash` of a stand-in give those of its tensor.

    Args:
        tensors: by the ids of their stand-ins.
    """
    functions = (builtins.id, builtins.hash)
    with replaced(*((builtins, each.__name__, _of_tensors(each, tensors)) for each in functions)):
        yield


@contextmanager
def keyed_by_stand_ins(
    containers: Sequence[Keyed],
    record: OutsideRecord,
    stand_ins: Mapping[int, torch.Tensor],
    replaced_in: Collection[int],
) -> Iterator[None]:
    """While active, these containers have stand-ins as keys, in addition to the tensors or, if the
    step iterates over keys or changes them, in their place.

    Args:
        record: notes where a step goes through the keys.
        stand_ins: by the ids of the tensors.
        replaced_in: containers in which they are in the place of the tensors (by id).
    """
    record.exchanged = {id(holder) for _, holder in containers if id(holder) in replaced_in}
    record.doubled = {id(holder) for _, holder in containers} - record.exchanged
    for kind, holder in containers:
        content = _read(kind, holder)
        others = _with_other_keys(kind, content, stand_ins)
        if id(holder) in record.doubled:
            others = _joined(kind, content, others)
        kind.write(holder, others)
    try:
        yield
    finally:
        touched = [(_kind_of(holder), holder) for holder in record.touched()]
        for kind, holder in [*containers, *touched]:
            content = _read(kind, holder)
            if id(holder) in record.doubled:
                content = _without(kind, content, record.stands_for)
            kind.write(holder, _with_other_keys(kind, content, record.stands_for))


def _kind_of(holder: Any) -> ObjectKind:
    return contents.TABLE if isinstance(holder, dict) else contents.SET


def _read(kind: ObjectKind, holder: Any) -> Any:
    """The keys and values of a container, in order."""
    return kind.read(holder) if kind is contents.TABLE else list(set.__iter__(holder))


def _with_other_keys(kind: ObjectKind, content: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """Returns a container's contents under other keys, in the same order."""
    keys = [others.get(id(key), key) for key in _keys(kind, content)]
    return (keys, content[1]) if kind is contents.TABLE else keys


def _joined(kind: ObjectKind, first: Any, second: Any) -> Any:
    if kind is contents.TABLE:
        return [*first[0], *second[0]], [*first[1], *second[1]]
    return [*first, *second]


def _without(kind: ObjectKind, content: Any, keys: Mapping[int, torch.Tensor]) -> Any:
    if kind is not contents.TABLE:
        return [key for key in content if id(key) not in keys]
    pairs = [(k, v) for k, v in zip(*content, strict=True) if id(k) not in keys]
    return [k for k, _ in pairs], [v for _, v in pairs]


def _of_tensors(function: Callable[[Any], int], tensors: Mapping[int, torch.Tensor]) -> Any:
    """A replacement for `id` or `hash` in the step's code."""
    own = builtins.id

    def asked(value: Any) -> int:
        tensor = tensors.get(own(value))
        if tensor is None and not isinstance(value, STORAGES):
            return function(value)
        file = calling_frame().f_code.co_filename
        if is_torch_file(file) or is_own_file(file):
            return function(value)
        if tensor is None:
            refuse_address()
        return function(tensor)

    return asked
