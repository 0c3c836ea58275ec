"""Modules without tensors, such as loss functions, that others like them may take the place of."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from graphopt import _compat
from graphopt.tracing.outside.places import is_value

_TABLES = ("_parameters", "_buffers")
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType)


def description_of(module: nn.Module) -> tuple[Any, ...] | None:
    """All that a module is, so that one with the same description computes the same.

    None where that cannot be said: it has a tensor, a hook, or an attribute that is neither a
    number, text or the like nor a function or class.
    """
    found: list[Any] = [type(module)]
    for name, value in vars(module).items():
        part = _children(value) if name == "_modules" else _attribute(name, value)
        if part is None:
            return None
        found.append((name, *part))
    return tuple(found)


def _children(modules: dict[str, nn.Module | None]) -> tuple[Any, ...] | None:
    children = [(n, m if m is None else description_of(m)) for n, m in modules.items()]
    if any(m is None and modules[n] is not None for n, m in children):
        return None
    return tuple(children)


def _attribute(name: str, value: Any) -> tuple[Any, ...] | None:
    if name in _TABLES:
        return tuple(value) if not any(each is not None for each in value.values()) else None
    if is_value(value) or isinstance(value, _BY_IDENTITY):
        return (value,)
    return () if isinstance(value, (dict, set, list)) and not value else None


def only_within(module: nn.Module, others: Iterable[nn.Module]) -> Collection[int] | None:
    """The module and those in it, by `id`; None where one of `others` has one of them as well."""
    within = set(map(id, module.modules()))
    for other in others:
        if id(other) not in within and not within.isdisjoint(
            map(id, _compat.own_modules(other).values())
        ):
            return None
    return within
