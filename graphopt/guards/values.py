"""Kinds and values that guards record, and their comparison with the present ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from graphopt.ir.same_values import same_value
from graphopt.tracing.tensors.classes import special_class
from graphopt.tracing.tensors.lost_history import kind_of_history

_PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype)


_KIND: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(
    "shape", "layout", "dtype", "device", "requires_grad"
)
_STRIDE = methodcaller("stride")
_WITH_STRIDES = (torch.strided, torch.sparse_coo)


def tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the facts about a tensor that a graph is specialized on."""
    special = special_class(tensor) or kind_of_history(tensor)
    if tensor.is_nested:
        return (None, None, tensor.layout, tensor.dtype, tensor.device, None, special)
    shape, layout, *others = _KIND(tensor)
    strides = tensor.stride() if layout in _WITH_STRIDES else None
    return (shape, strides, layout, *others, special)


def gradient_kind(tensor: torch.Tensor) -> Any:
    """Returns the facts about a tensor argument's gradient that a graph is specialized on: None if
    there is none, its kind, or that the tensor is no leaf."""
    if not tensor.is_leaf:
        return "computed"
    return None if tensor.grad is None else (tensor_kind(tensor.grad), tensor.grad.is_leaf)


def kinds_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    """Returns the facts of `tensor_kind` for many tensors, column by column, in half the time."""
    return list(map(_KIND, tensors)), list(map(_STRIDE, tensors)), list(map(special_class, tensors))


def items(value: object) -> list[Any] | None:
    """Returns the contents of a list or dictionary, for later comparison; None for other
    objects."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list) else None


def same_items(before: list[Any], container: object) -> bool:
    """True if a container holds the same objects or equal constants as before."""
    now = items(container)
    if now is None or len(now) != len(before):
        return False
    return all(a is b or same_constant(a, b) for a, b in zip(now, before, strict=True))


def same_constant(a: Any, b: Any) -> bool:
    """True if two values are one object, or equal plain constants of one type."""
    return same_value(a, b, is_plain)


def is_plain(value: object) -> bool:
    """True if a value is compared by value, as plain constants are; others go by identity."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def change(kind: tuple[Any, ...] | None, now: Any) -> str:
    """Formats a tensor's difference from its former kind, in brackets; empty if it is no tensor
    now."""
    if kind is None or not isinstance(now, torch.Tensor) or tensor_kind(now) == kind:
        return ""
    return f" ({describe(kind, tensor_kind(now))})"


def describe(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Formats the first difference between two kinds of tensors."""
    names = ("shape", "stride", "layout", "dtype", "device", "requires_grad", "class")
    pairs = zip(names, before, now, strict=True)
    name, old, new = next(each for each in pairs if each[1] != each[2])
    old, new = (list(each) if isinstance(each, torch.Size) else each for each in (old, new))
    return f"{name} {old} became {new}"
